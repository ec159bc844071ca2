"""Side-by-side speed: identical work, one run, one table of ratios."""
