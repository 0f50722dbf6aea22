"""`lm reproduce`: a table of a paper by one command, its price before, and the verdicts on the claims of the papers."""
