"""The same for other libraries. Nothing here is imported by the core: each module comes in with its own extra."""
