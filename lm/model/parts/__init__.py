"""The parts of a layer, one file each: a part makes its parameters from the options of the layer, and applies itself.

`lm.model.block.PARTS` lists them. A part that a layer does not have is None.
"""
