"""Parts of the model in PyTorch (`modeling_lm.py`). `lm export` copies them; nothing else imports them."""
