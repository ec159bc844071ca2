"""Run directories: everything a run leaves behind, and how it goes on after an interruption."""
