"""The token store: what `lm prepare` writes and training and evaluation read."""

from lm.configurable import configurable, field


@configurable('data')
class DataConfig:
    """Which prepared tokens to train and evaluate on."""

    path: str = field('', help='the token store that `lm prepare` writes: a folder, gs://… or s3://…')
    train_split: str = field('train', help='the split to train on')
    eval_split: str = field('validation', help='the split of the periodic evaluation')
