"""Code that a bare interpreter runs inside the sandbox; nothing here imports the rest of nalora."""
