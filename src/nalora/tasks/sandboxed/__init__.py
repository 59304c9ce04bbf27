"""What runs inside the sandbox, by a bare interpreter: nothing here imports the rest of nalora."""
