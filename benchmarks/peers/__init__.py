"""Runners that know nothing of fedretain: each trains a given work in one framework, in its own environment."""
