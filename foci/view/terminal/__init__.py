"""view/terminal."""
