"""The application whose work is led."""
