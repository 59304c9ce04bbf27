"""The folder that `nalora launch` puts first in PYTHONPATH; it has no other modules than sitecustomize."""
