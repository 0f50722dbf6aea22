"""`lm reproduce`: a table of a paper by one command.

descriptions   what a table runs, from the toml files of configs/papers
scale          the paper's experiment with all lengths divided, and the text and steps of a smaller scale
runs           the runs of a table: which row, column and seed each of them fills
price          needs of the runs before they are paid for, by the compiler of `lm check`
table          the paper's numbers beside ours, and the rank correlation
hand_over      the runs on machines of a cloud or a cluster
claims         what the papers claim, and what of it holds
"""
