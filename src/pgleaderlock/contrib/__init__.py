"""Integrations with other libraries: one module per framework, each with its own extra. The core never imports them."""
