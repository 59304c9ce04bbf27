"""The generated parts of docs/findings.md and its picture."""
