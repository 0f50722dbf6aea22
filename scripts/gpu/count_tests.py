#!/usr/bin/env python
"""Runs pytest and writes the counts and the failures as JSON: `count_tests.py FILE` and the arguments of pytest."""

import json
import pathlib
import sys
import tempfile
import xml.etree.ElementTree

import pytest


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, 'report.xml')
        code = pytest.main(['-q', '-p', 'no:cacheprovider', f'--junitxml={report}', *sys.argv[2:]])
        suite = xml.etree.ElementTree.parse(report).getroot()[0]
    counts = {name: int(suite.attrib[name]) for name in ('tests', 'failures', 'errors', 'skipped')}
    broken = {
        f'{case.attrib["name"]}': (child.attrib.get('message') or '')[:500]
        for case in suite.iter('testcase')
        for child in case
        if child.tag in ('failure', 'error', 'skipped')
    }
    pathlib.Path(sys.argv[1]).write_text(json.dumps(counts | {'notes': broken}))
    return int(code)


if __name__ == '__main__':
    sys.exit(main())
