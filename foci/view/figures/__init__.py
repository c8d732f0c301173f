"""view/figures."""
