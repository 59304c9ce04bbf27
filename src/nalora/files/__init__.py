"""How files are read and written: whole or not at all, and never somebody else's."""
