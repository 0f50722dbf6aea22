"""The keys of the files that `lm` writes: one `TypedDict` per object, one key per line with its meaning.

`tests/site/test_written_files.py` compares them with the files of real commands.
"""

from typing import Any, NotRequired, TypedDict


class StartInfo(TypedDict):
    """A start of a run. A key that is missing has the value of the start before."""

    when: str  #: ISO 8601
    first_step: int  #: step that the start goes on from
    command: NotRequired[str]  #: command line
    folder: NotRequired[str]  #: folder that it was given in, from which relative paths count
    versions: NotRequired[dict[str, str | None]]  #: package → version
    git_commit: NotRequired[str | None]  #: commit of the code; `-dirty` with local changes
    device_kind: NotRequired[str]  #: name of the devices
    device_count: NotRequired[int]  #: devices of all processes
    process_count: NotRequired[int]  #: processes of the job
    version_changes: NotRequired[dict[str, list[str]]]  #: part of JAX → versions before and now, if they differ


Rewind = TypedDict(
    'Rewind',
    {
        'when': str,  #: ISO 8601
        'to': int,  #: step that the run went back to
        'from': int,  #: newest step before
        'changed': list[list[str | None]],  #: binding, old value and new value of each change
    },
)
"""A `lm train --rewind_to`."""


BranchPoint = TypedDict(
    'BranchPoint',
    {
        'from': str,  #: run directory of the parent
        'step': int,  #: checkpoint that the branch began from
        'changed': list[list[str | None]],  #: binding, old value and new value of each change
    },
)
"""A `lm train --branch_from`."""


class DifferenceRecord(TypedDict):
    """Bits of several chips that should have been equal, and were not; the run ended with 45."""

    when: str  #: time, ISO 8601
    step: int  #: the step that was not taken, or not saved
    what: str  #: what was compared
    arrays: list[str]  #: arrays that differed, a hundred at most
    groups: list[list[str]]  #: devices with their hosts; one of each group computed wrongly
    certain: bool  #: whether a majority of other devices agreed
    stays: bool | None  #: whether the difference came again; `null` where it could not be repeated


class Accounts(TypedDict):
    """Seconds by what they were spent on."""

    step: float  #: steps that the run kept: the productive time
    imports: float  #: from the begin of the process to the begin of the run
    start: float  #: checks, devices, opening data
    initialize: float  #: making the state of a new run
    restore: float  #: reading a checkpoint of this run or of its parent
    trace: float  #: waiting for JAX to trace the step
    compile: float  #: waiting for the compiler
    data: float  #: waiting for batches
    checkpoint: float  #: waiting for saves
    evaluation: float  #: evaluations
    replay: float  #: comparing what chips compute (train.replay_every)
    lost: float  #: steps that were done again after a restart
    restart: float  #: between the last record of a process and the begin of the next process


class Ledger(TypedDict):
    """Where the time of a run went, over all its starts."""

    share: float  #: share of the time that went into steps
    seconds: Accounts  #: seconds by account
    starts: int  #: starts of the run
    started: float  #: first start, in seconds since the epoch
    updated: float  #: when this was written, in seconds since the epoch
    finished: bool  #: whether the last step is done


class RunInfo(TypedDict):
    """The contents of run.json."""

    started: str  #: first start, ISO 8601
    parameters: int  #: trainable parameters
    data: NotRequired[str]  #: fingerprint of the token store, or of the task
    tokenizer: NotRequired[str]  #: fingerprint of the tokenizer
    saved_step: NotRequired[int | None]  #: newest checkpoint that is complete
    goodput: NotRequired[Ledger]  #: where the time of the run went
    differences: NotRequired[list[DifferenceRecord]]  #: chips that did not agree, the last hundred times
    starts: NotRequired[list[StartInfo]]  #: every start, the first one first
    starts_left_out: NotRequired[int]  #: starts that are not listed any more
    rewinds: NotRequired[list[Rewind]]  #: every rewind
    branch: NotRequired[BranchPoint]  #: where the run began, if it is a branch
    imported: NotRequired[str]  #: checkpoint that `lm import` made the run of
    begin_id: NotRequired[int]  #: token that stands before every text, if the imported checkpoint has one
    end_id: NotRequired[int]  #: token that ends a document, of the data or of the imported checkpoint


class TrainRecord(TypedDict):
    """A logged step. The loss of each store of a mixture stands as `loss/NAME`, its epochs as `epochs/NAME`."""

    kind: str  #: `train`
    step: int  #: steps that are done
    loss: float  #: mean nats per token of this step
    learning_rate: float  #: learning rate of this step
    grad_norm: float  #: global norm of the gradient, before clipping
    tokens: int  #: tokens that all steps have seen
    tokens_per_second: float  #: since the record before
    mfu: float | None  #: model FLOP utilisation; `null` where the peak of the device is not known
    seconds: float  #: training time up to this step, without evaluations
    skipped_steps: int  #: updates that were skipped because a number was not finite, in the whole run
    kept_numbers: NotRequired[int]  #: how often a parameter kept its value: its update was not finite; absent if never
    data_wait_seconds: float  #: time that steps waited for data since the record before
    balance_loss: NotRequired[float]  #: balance loss without coefficient, mean over layers; 1 if even; with experts
    expert_load_max: NotRequired[float]  #: largest share of a step's tokens that one expert of a layer gets
    expert_load_layer: NotRequired[int]  #: layer of that expert, from 0
    expert_load: NotRequired[list[float]]  #: share of the tokens for each expert of this layer; the sum is `top_k`
    idle_experts: NotRequired[int]  #: experts that no token of the step chose, in all layers


class PositionLoss(TypedDict):
    """The loss at the positions `start` to `end` − 1 of the context; ranges double in length."""

    start: int  #: the first position, from 0
    end: int  #: one more than the last position
    tokens: int  #: tokens that were scored at these positions
    loss: float  #: mean nats per token


class Conditioning(TypedDict):
    """The tokens before the scored tokens of an evaluation; `lm report` compares figures of one kind."""

    before_texts: str  #: `begin` (the token of the model), `end of document`, or `nothing`
    before_windows: str  #: the same, or `previous token`: the token before the window in the split
    first_token_sees: str  #: the token before the window, `N tokens of the window before`, or `nothing`
    token_id: NotRequired[int]  #: the token before texts
    token: NotRequired[str]  #: its piece


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
    conditioning: NotRequired[Conditioning]  #: what the tokens were predicted from
    mask_documents: NotRequired[bool]  #: `True` where no token saw another document
    copied_share: NotRequired[float]  #: share of the split's tokens that are copies of training documents, if above 0
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


class LockOwner(TypedDict):
    """The process that trains in a run directory."""

    host: str  #: name of its machine
    pid: int  #: number of its process
    pid_started: str | None  #: start of the process, in ticks since the boot
    pid_namespace: str  #: namespace of the process numbers
    boot: str  #: identity of the boot of the machine
    since: str  #: when it took the lock, ISO 8601
    uuid: str  #: identity of this lock
    inode: int | None  #: inode of the run directory, which a copy does not share
    renewed: float  #: last sign of life, in seconds since the epoch


class Leaf(TypedDict):
    """An array of a checkpoint."""

    dtype: str  #: type of its numbers
    shape: list[int]  #: its shape
    checksum: int  #: checksum of its bytes


class CheckpointRecord(TypedDict):
    """The record of a checkpoint."""

    format: int  #: version of this format
    step: int  #: steps that are done
    leaves: dict[str, Leaf]  #: name → array
    fingerprints: dict[str, str]  #: `data` and `tokenizer` of the run
    metrics: dict[str, float | str]  #: `loss` of an evaluation at this step, if there was one
    metadata: dict[str, Any]  #: the configuration as gin text, training time, and the batches that were left out
    sha256: str  #: SHA-256 of this record without this key


class SplitInfo(TypedDict):
    """A split of a token store."""

    documents: int  #: documents
    bytes: int  #: UTF-8 bytes of the cleaned text
    words: int  #: words between white space
    tokens: int  #: tokens, end-of-document tokens included
    decoded: NotRequired[int]  #: documents whose tokens were decoded for comparison
    unchanged: NotRequired[int]  #: documents of these that were equal to the text
    bad_records: int  #: documents that were skipped (`bad_records.jsonl`)
    published_words: NotRequired[int]  #: words that the authors of the data publish
    in_train: NotRequired[dict[str, int]]  #: `documents` that are also in train, letter by letter, and their `tokens`
    sha256: str  #: fingerprint of tokens and document ends


class TokenizerInfo(TypedDict):
    """The tokenizer of a token store."""

    file: NotRequired[str]  #: its file in the store
    sha256: str  #: fingerprint of that file
    vocab_size: int  #: tokens that it knows
    eod_id: NotRequired[int]  #: the end-of-document token
    begin_id: NotRequired[int | None]  #: the token that every document of the store begins with; `null`: none
    lossless: bool  #: whether decoding gives every text back


class StoreInfo(TypedDict):
    """A token store that is finished."""

    format: int  #: version of this format
    source: dict[str, Any]  #: kind and settings of the source
    cleaning: str  #: what was done to the text
    dtype: str  #: type of the tokens: `uint16` or `uint32`
    files: NotRequired[dict[str, Any]]  #: count, bytes and fingerprint of the files of the source
    splits: dict[str, SplitInfo]  #: name → split
    tokenizer: TokenizerInfo  #: its tokenizer
    settings: dict[str, Any]  #: all settings that the contents depend on
    created_with: NotRequired[dict[str, str]]  #: package → version
    chain: NotRequired[str]  #: SHA-256 of `chain.jsonl`
    fingerprint: str  #: SHA-256 of all splits and the tokenizer
    checksum: str  #: SHA-256 of this file without this key


class SweepRow(TypedDict):
    """A point of a sweep. What was measured is `null` until it is known."""

    index: int  #: number of the point, from 0
    point: str  #: its name, and the name of its run directory
    settings: dict[str, str]  #: binding → value on the axes of the sweep
    run_dir: str  #: its run directory
    status: str  #: `waiting`, `interrupted`, `done`, `failed` or, in a search, `pruned`
    step: int  #: newest step that was logged
    steps: int  #: steps of the whole run
    split: str | None  #: split of the newest evaluation
    loss: float | None  #: its mean nats per token
    perplexity: float | None  #: its perplexity per token
    word_perplexity: float | None  #: its perplexity per word
    bits_per_byte: float | None  #: its bits per byte
    accuracy: float | None  #: its accuracy, of tasks and hidden tokens
    tokens_per_second: float | None  #: median over the run
    exit_code: int | None  #: exit code of the last attempt
    error: str | None  #: what the last attempt failed with


class SearchFacts(TypedDict):
    """How the points of a search were drawn."""

    sampler: str  #: `tpe` or `random`
    seed: int  #: of the draws
    trials: int  #: how many
    parallel: int  #: trials at a time
    prune: bool  #: whether Hyperband ends trials early
    space: dict[str, str]  #: binding → distribution
    importance: dict[str, float]  #: binding → share of the differences between losses; empty for few trials


class SweepTable(TypedDict):
    """All points of a sweep."""

    kind: str  #: `sweep`
    search: NotRequired[SearchFacts]  #: how the points were drawn; a grid has none
    points: list[SweepRow]  #: a row per point
