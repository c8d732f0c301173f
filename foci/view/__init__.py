"""A Record as people see it: in a terminal, in a plot, in a page. A view takes a Record and nothing else."""
