"""The Long Range Arena (Tay et al. 2021): its five tasks, read from left to right."""
