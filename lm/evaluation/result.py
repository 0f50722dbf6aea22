"""The keys of an evaluation: what `lm evaluate` writes to evaluations/*.json, and training to metrics.jsonl."""

from typing import Any, NotRequired, TypedDict


class PositionLoss(TypedDict):
    """The loss at the positions `start` to `end` − 1 of the context; ranges double in length."""

    start: int  #: the first position, from 0
    end: int  #: one more than the last position
    tokens: int  #: tokens that were scored at these positions
    loss: float  #: mean nats per token


class Evaluation(TypedDict):
    """The result of scoring a split, or the examples of a task."""

    split: str  #: the split that was scored
    step: int  #: step of the weights
    context_length: int  #: tokens of a window
    loss: float  #: mean nats per token, or per answer of a task
    perplexity: float  #: exponential of the loss
    sum_nats: float  #: nats of all tokens together
    tokens: NotRequired[int]  #: tokens that were scored
    window: NotRequired[str]  #: `disjoint`, or `sliding:STRIDE`
    mask_documents: NotRequired[bool]  #: `True` where no token saw another document
    bytes: NotRequired[int]  #: UTF-8 bytes of the text, if every token of the split was scored
    words: NotRequired[int]  #: words of the text, on the same condition
    documents: NotRequired[int]  #: documents of the text, on the same condition
    word_perplexity: NotRequired[float]  #: exponential of nats per word, on the same condition
    bits_per_byte: NotRequired[float]  #: bits per byte of the text, on the same condition
    loss_by_position: NotRequired[list[PositionLoss]]  #: the loss by position in the context
    tokenizer_sha256: NotRequired[str]  #: fingerprint of the tokenizer
    accuracy: NotRequired[float]  #: share of the tokens, examples or answers that the model finds most probable
    baseline_accuracy: NotRequired[float]  #: accuracy of the most frequent token
    baseline_perplexity: NotRequired[float]  #: perplexity of the frequencies of the tokens
    task: NotRequired[str]  #: gin name of the task
    examples: NotRequired[int]  #: examples of the task
    answers: NotRequired[int]  #: answers in these examples
    accuracy_per_answer: NotRequired[float]  #: share of the answers that are right
    accuracy_per_example: NotRequired[float]  #: share of the examples whose answers are all right
    accuracy_by_slice: NotRequired[dict[str, float]]  #: accuracy of each part of the examples
    path: NotRequired[str]  #: in `sets`: the token store
    sets: NotRequired[dict[str, Any]]  #: name → evaluation of each store of a mixture and of each of `evaluate.sets`


class SavedEvaluation(Evaluation):
    """An evaluation that `lm evaluate` has written, with what tells it from others of the run."""

    overrides: NotRequired[dict[str, str | None]]  #: binding → value that differs from `config.gin`
    data_sha256: NotRequired[str]  #: fingerprint of the token store


class EvalRecord(Evaluation):
    """An evaluation during training; a figure of a set stands as `FIGURE/NAME`, such as `perplexity/books`."""

    kind: str  #: `eval`
    seconds: float  #: training time up to this step, without evaluations
