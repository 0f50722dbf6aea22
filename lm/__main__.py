"""`python -m lm VERB …` means `lm VERB …`, for example if the folder of the command is not on the path."""

import runpy

if __name__ == '__main__':
    # This is not `from lm.cli import main`: imported by another program, that module leaves signals and streams alone.
    runpy.run_module('lm.cli', run_name='__main__', alter_sys=True)
