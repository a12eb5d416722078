"""One command a file; pipeline/__main__.py lists them."""
