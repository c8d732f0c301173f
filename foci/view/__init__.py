"""Shows a Record in a terminal, in figures and in an HTML page. Views take a Record and nothing else.

units: split a sequence into words or tokens
selection: which head and which query a view shows, and their attention weights
colors: color ramps for terminals and plots
terminal: a Record as colored text
figures: a Record as matplotlib figures
page: a Record as one HTML file
"""
