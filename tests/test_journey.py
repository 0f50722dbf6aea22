"""The words of the journeys: what must fail fails, and the message names the step and the command."""

import journey
import pytest


@pytest.fixture
def write(tmp_path):
    """Returns a function that writes a journey of these lines."""

    def write_script(*lines: str):
        path = tmp_path / 'some.sh'
        path.write_text('\n'.join([f'source "{journey.WORDS}"', *lines]) + '\n')
        return path

    return write_script


def test_a_journey_passes(write):
    script = write(
        'step a text, a figure and a refusal',
        """expect python -c 'print("{\\"a\\": [{\\"b\\": 1.5}]}")'""",
        'equal "$(figure a.0.b)" 1.5',
        'shows a b',
        'hides c',
        """refuse 2 python -c 'import sys; sys.exit(print("name it: `lm`", file=sys.stderr) or 2)'""",
        'echo 1 > "a file"',
        'is_there "a file"',
        'is_gone "another file"',
    )
    assert '== a text, a figure and a refusal' in journey.run(script)


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ('expect python -c "print(3); exit(3)"', 'exit code 3, and 0 was expected: python -c print(3); exit(3)\n  | 3'),
        ('refuse 2 python -c "exit(3)"', 'exit code 3, and 2 was expected: python'),
        ('refuse 2 python -c "exit(2)"', 'one line on stderr was expected: python'),
        ('expect echo yes; shows yes no', 'the output must contain: no\n  | yes'),
        ('expect echo yes; hides yes', 'the output must not contain: yes'),
        ('is_there here', 'must be there: here'),
        ('is_gone .', 'must not be there: .'),
        ('equal 1 2', "must be equal: '1' and '2'"),
        ('equal "$(figure loss)" "$(figure loss)"', 'this command failed: python -'),
        ('expect echo "{}"; equal "" ""', 'a text to compare is empty'),
        ('expect true; run_remedy', 'names no command'),
        ('cd nowhere', 'this command failed: cd nowhere'),
        ('(cd nowhere); true', 'this command failed: cd nowhere'),
        ('interrupt INT run 5 python -c ""', 'it ended before step 5: python'),
    ],
)
def test_what_is_not_so_fails_and_names_the_command(write, line, message):
    with pytest.raises(journey.JourneyFailed) as failure:
        journey.run(write('step the second act', line, 'echo AFTER'))
    assert message in str(failure.value)
    assert 'failed at: the second act' in str(failure.value)
    assert 'AFTER' not in str(failure.value)


def test_a_signal_reaches_the_command(write):
    script = write(
        'mkdir run; echo \'{"step": 3, "loss": 1}\' > run/metrics.jsonl',
        "interrupt INT run 3 python -c 'import time; time.sleep(60)'",
        'echo "ended with $code"',
    )
    assert 'ended with 1' in journey.run(script)  # 130, or 1 where Python was still starting


def test_a_journey_that_takes_too_long_is_ended(write):
    with pytest.raises(journey.JourneyFailed, match='took over 1 seconds'):
        journey.run(write('step waiting', 'sleep 60'), seconds=1)


def test_a_line_makes_a_journey_slow():
    assert journey.read_marks('# slow: it installs\n') == ['journey', 'slow']
    assert journey.read_marks('# slow:\necho # slow: no\n') == ['journey']


def test_each_journey_is_a_test(request):
    names = {path.stem for path in journey.FOLDER.glob('*.sh')} - {'words'}
    found = {path: journey.collect(path, request.session) for path in journey.FOLDER.glob('*.sh')}
    assert {script.path.stem for script in found.values() if script} == names
    marks = {mark.name for script in found.values() if script for item in script.collect() for mark in item.own_markers}
    assert marks >= {'journey'}
