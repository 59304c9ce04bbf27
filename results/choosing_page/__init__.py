"""The generated parts of docs/choosing.md and of the README's first screen."""
