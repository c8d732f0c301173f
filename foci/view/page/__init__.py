"""view/page."""
