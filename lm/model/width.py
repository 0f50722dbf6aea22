"""Scales that follow the width of a model, so that one learning rate is right for all widths (µP: Yang et al. 2022,
Table 8).

A step should change what layers and logits are by as much in a wide model as in a narrow one. m is the width over the
base width (`ModelConfig.widening`); heads keep their size and grow in number, feed-forward layers grow alike.

      parameter                                  first size        rate
      matrix that sums over the width            1/√D, as ever     1/m with Adam, 1/√m with Muon (`Rule.growth`)
      embedding, untied output matrix            1/√D, as ever     1/√m
      gain and bias of the last norm             1/√m              1/√m
      everything else                            as ever           1

Adam's steps agree with a matrix's inputs, so that what they add to its sums grows like m. An embedding is looked up and
multiplied by √D: its step relative to its size is to stay. An output matrix, which the embedding mostly is, too, would
have to move by 1/m; where logits are multiplied by 1/√m it moves by 1/√m, as an embedding does. That factor is in the
gain of the last norm, in its first size and in its rate: what reads the weights needs to know of no multiplier.

Weight decay is not scaled: rate times decay is to be the same at all widths (Wang & Aitchison 2024).
"""

from lm.parameters import Declaration

SUMMED = ('embed', 'all_heads', 'mlp')
"""The axes that grow with the width."""


def compute_output_scale(widening: float) -> float:
    """Returns the scale of the logits, and of parameters with an embedding's size, at `widening` times the
    base width."""
    return widening**-0.5


def compute_rate_scale(declaration: Declaration, widening: float, growth: float) -> float:
    """Returns the scale of a parameter's learning rate at `widening` times the base width.

    Args:
        declaration: what the parameter is.
        widening: width over base width.
        growth: how the rule's steps add up (`Rule.growth`).
    """
    if declaration.kind == 'embedding' or declaration.output:
        return compute_output_scale(widening)
    is_summed = declaration.kind == 'matrix' and declaration.axes[-2] in SUMMED
    return widening**-growth if is_summed else 1.0
