"""`python -m lm VERB …` is `lm VERB …`, such as where the folder of the command is not on the path."""

import runpy

if __name__ == '__main__':
    # Not `from lm.cli import main`: of a module of another program it would not take the signals and streams.
    runpy.run_module('lm.cli', run_name='__main__', alter_sys=True)
