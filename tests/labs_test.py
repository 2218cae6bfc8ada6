#!/usr/bin/env python3
"""Labs: handouts that do not leak, a grader that gives nobody what he has not earned, and says what is wrong.

    labs_test.py CASE BUILD [LAB]

BUILD is a build folder with the grader and the stages' test suite. Cases: see the end."""

import filecmp
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / 'course'))
sys.dont_write_bytecode = True
import grade  # noqa: E402
import handout  # noqa: E402
from labs_cases import CHEATS, FAULTS, QUICK_CHEATS, edited  # noqa: E402

KERNELS = {''.join(handout.stage_of(name)): name for name in handout.tracked_files(ROOT)
           if handout.stage_of(name) and name.endswith('.cu') and 'BEGIN SOLUTION' in (ROOT / name).read_text()}
SECRET = 'labs_test'
failures = 0


def bad(text):
    global failures
    failures += 1
    print('FAILED:', text)


def expect(holds, text):
    if not holds:
        bad(text)


def solution(lab):
    """The stage's own kernel, whole: as a student who has done the lab would hand it in."""
    name = KERNELS[lab]
    return handout.cut_solutions((ROOT / name).read_text(), name, None)


class Folder:
    """A folder of its own for as long as a `with` lasts."""

    def __enter__(self):
        self.path = Path(tempfile.mkdtemp(prefix='labs-test-'))
        return self.path

    def __exit__(self, *_):
        shutil.rmtree(self.path)


class Grader:
    def __init__(self, build, lab):
        self.lab, self.kernel = lab, KERNELS[lab]
        self.toolchain = grade.Toolchain(build, grade.is_of_hopper(lab))
        self.rubric = grade.load_rubric(ROOT / f'course/rubrics/{lab}.json', lab)

    def __call__(self, source, variation=False):
        with Folder() as folder:
            (folder / 'kernel.cu').write_text(source)
            return grade.grade(self.kernel, self.lab, folder / 'kernel.cu', self.toolchain, self.rubric, SECRET, variation)


def said(results):
    """All that a submission's author or instructor is told."""
    return '\n'.join([results['output']] + [test['output'] for test in results['tests']])


def expect_score(results, low, high, what):
    expect(low <= results['score'] <= high, f"{what}: {results['score']} points, expected {low} to {high}\n{said(results)[:2000]}")
    expect(abs(results['score'] - sum(t['score'] for t in results['tests'])) < 0.01, f'{what}: the sum is not the score')


# --- handouts ----------------------------------------------------------------------------------------------------------------

def significant(line):
    """A line of code in a form to compare, without its comment; '' where it tells nothing."""
    code = re.sub(r'\s+', ' ', line.split('//')[0]).strip()
    return code if len(code) >= 16 and not code.startswith('#pragma') else ''


def check_handout(lab, made):
    name = KERNELS[lab]
    source = (ROOT / name).read_text()
    solutions = {significant(line) for _, lines in handout.solutions_of(source, name) for line in lines} - {''}
    files = [path for path in sorted(made.rglob('*')) if path.is_file()]
    names = [str(path.relative_to(made)) for path in files]
    # What stands in an earlier stage, in common/gpu or in the given part of the kernel tells nothing.
    known = [path.read_text() for path, its in zip(files, names) if its.startswith('common/gpu/') or
             (handout.stage_of(its) and its.endswith('.cu') and its != name)] + [handout.cut_solutions(source, name, lab)]
    known = ' '.join(re.sub(r'\s+', ' ', text) for text in known)
    secret = {line for line in solutions if line not in known}
    expect(secret, f'{lab}: the solution has no line of its own')
    for path, its in zip(files, names):
        data = path.read_bytes()
        if not handout.is_text(data) or its.startswith('tests/data/'):
            continue
        text = re.sub(r'\s+', ' ', data.decode())
        for line in secret:
            expect(line not in text, f'{lab}: {its} has a line of the solution: {line}')
        for word in ('BEGIN SOLUTION', 'END SOLUTION', 'BEGIN INSTRUCTOR', 'BEGIN STAGE', 'HANDOUT:'):
            expect(word not in text, f'{lab}: {its} still has a mark: {word}')
    for its in names:
        stage = handout.stage_of(its)
        later = stage and (stage[0] > lab[:2] or (stage[0] == lab[:2] and stage[1] > lab[2:] and lab[2:]))
        expect(not later, f'{lab}: {its} comes after the lab')
        expect(not its.startswith(('course/', 'docs/results/', '.git/', '.ci/', 'build/')), f'{lab}: {its} is none of a student\'s')
    expect('LAB.md' in names and name in names, f'{lab}: no LAB.md, or no kernel')
    cut = (made / name).read_text()
    expect(cut.count('not_implemented(') == len(handout.solutions_of(source, name)), f'{lab}: a TODO is missing')
    expect(handout.put_back(cut, lab, source, name) == solution(lab), f'{lab}: the solution put back is not the kernel')
    lesson = (made / os.path.dirname(name) / 'README.md').read_text()
    expect('\n## Lab' in lesson, f'{lab}: the lesson has no section Lab')
    expect('\n## Measured' not in lesson and '\n## Reading the kernel' not in lesson, f'{lab}: the lesson tells the solution')
    links = subprocess.run([made / 'tests/house_test.sh', 'links'], stdout=subprocess.PIPE)
    expect(links.returncode == 0, f'{lab}: {links.stdout.decode()}')
    kernels = subprocess.run([made / 'tests/house_test.sh', 'kernel_files'], stdout=subprocess.PIPE)
    expect(kernels.returncode == 0, f'{lab}: {kernels.stdout.decode()}')


def same_trees(a, b):
    compared = filecmp.dircmp(a, b)
    pending = [compared]
    while pending:
        c = pending.pop()
        if c.left_only or c.right_only or c.funny_files:
            return False
        if any((Path(c.left) / f).read_bytes() != (Path(c.right) / f).read_bytes() or
               (Path(c.left) / f).stat().st_mode != (Path(c.right) / f).stat().st_mode for f in c.common_files):
            return False
        pending += c.subdirs.values()
    return True


def handouts(build):
    expect(set(KERNELS) >= {'02a', '02b', '02c', '02d', '03', '04', '05', '06', '07', '08', '09', '10a', '10b', '10c', '10d', '10e'},
           f'labs: {sorted(KERNELS)}')
    with Folder() as folder:
        for lab, name in KERNELS.items():
            for out in ('once', 'twice'):
                handout.make(ROOT, name, folder / f'{lab}_{out}')
            expect(same_trees(folder / f'{lab}_once', folder / f'{lab}_twice'), f'{lab}: two handouts differ')
            check_handout(lab, folder / f'{lab}_once')
        # The check itself notices a leak.
        before = failures
        made = folder / '06_once'
        (made / 'docs/method.md').write_text((made / 'docs/method.md').read_text() + '\n    l_own = l_own * rescale + sum;\n')
        real_bad, found = globals()['bad'], []
        globals()['bad'] = found.append
        check_handout('06', made)
        globals()['bad'] = real_bad
        expect(len(found) == 1 and 'docs/method.md' in found[0], f'a planted leak gave: {found}')
        assert failures == before or failures == before + 1
        # What is refused, in one line, with nothing left behind.
        for arguments, words in [((ROOT, '01_naive/kernel.cu', folder / 'x'), 'has no lab'),
                                 ((ROOT, KERNELS['06'], folder / '06_twice'), 'already there'),
                                 ((ROOT, KERNELS['06'], folder / 'no/x'), 'no folder')]:
            listing = sorted(os.listdir(folder))
            try:
                handout.make(*arguments)
                bad(f'not refused: {words}')
            except handout.Refused as why:
                expect(words in str(why) and '\n' not in str(why), f'refused with: {why}')
            expect(sorted(os.listdir(folder)) == listing, 'something was left behind')
        for text, words in [('// BEGIN SOLUTION: a\n', 'without END'), ('// END SOLUTION\n', 'without BEGIN'),
                            ('// BEGIN SOLUTION: a\n// BEGIN SOLUTION: b\n', 'within'),
                            ('// BEGIN SOLUTION: say "x"\n int a;\n// END SOLUTION\n', 'without "')]:
            try:
                handout.cut_solutions(text, 'k.cu', '06')
                bad(f'marks not refused: {text!r}')
            except handout.Refused as why:
                expect(words in str(why), f'refused with: {why}')


def suite_of(build, source, name, folder):
    """The stage's own tests (test_NN), with this source in the place of its kernel."""
    link = json.loads((build / 'tests/suite_link.json').read_text())
    toolchain = grade.Toolchain(build)
    unit = folder / 'unit.cpp'
    unit.write_text(source)
    subprocess.run([toolchain.compiler, *toolchain.flags, f'-DFLASHSTEPS_STAGE_FILE="{name}"', '-w', '-c', unit, '-o',
                    folder / 'unit.o'], check=True)
    subprocess.run([toolchain.compiler, '-o', folder / 'suite', *link['objects'].split(';'), folder / 'unit.o', *link['libraries'],
                    '-lpthread'], check=True)
    return folder / 'suite'


def lab(build, which):
    """The handout's kernel fails its tests with the TODO's words and earns nothing; the solution put back earns everything."""
    name = KERNELS[which]
    source = (ROOT / name).read_text()
    cut = handout.cut_solutions(source, name, which)
    todos = [text for text, _ in handout.solutions_of(source, name)]
    with Folder() as folder:
        suite = suite_of(build, cut, name, folder)
        run = subprocess.run([suite, '--gtest_filter=*Conformance.KeepsEveryConvention*:*EqualsTheLessonsFormulas*'], cwd=ROOT,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        text = run.stdout.decode()
        expect(run.returncode == 1, f'{which}: the tests of the handout ended with {run.returncode}, not with 1')
        expect(any(f'NOT IMPLEMENTED: {which}: {todo}' in text for todo in todos),
               f'{which}: the tests do not say the TODO: {text[-500:]}')
    grader = Grader(build, which)
    results = grader(cut)
    expect_score(results, 0, 0, f'{which}: the handout')
    expect(all(any(f'NOT IMPLEMENTED: {which}: {todo}' in test['output'] for todo in todos) for test in results['tests']),
           f'{which}: not every test says the TODO: {said(results)[:1500]}')
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    results = grader(handout.put_back(cut, which, source, name))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    expect_score(results, results['max_score'], results['max_score'], f'{which}: the solution')
    expect(results['max_score'] == 100, f"{which}: the points add up to {results['max_score']}")
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{which}: {results['score']:g} points, {seconds:.1f} s of processor time, "
          f'at most {after.ru_maxrss / 1024:.0f} MB a process')
    # Room for a busy machine, where the same work takes half as much processor time again, and more.
    expect(seconds < 25, f'{which}: grading takes {seconds:.1f} s of processor time')
    expect(after.ru_maxrss < 600 * 1024, f'{which}: a process of grading takes {after.ru_maxrss} KB')


def variation(build, which):
    """The stage's own solution is no answer to the variation."""
    results = Grader(build, which)(solution(which), True)
    expect_score(results, 0, 10, f'{which}: its own solution, as its variation')
    expect(results['max_score'] == 100, f"{which}: the variation's points add up to {results['max_score']}")


# --- cheats and faults -------------------------------------------------------------------------------------------------------

def cheats(build, which):
    """Those of a few kinds ('quick'), or every fourth ('0' to '3')."""
    grader, source = Grader(build, '06'), solution('06')
    for number, (name, (make, words)) in enumerate(CHEATS.items()):
        if name not in QUICK_CHEATS if which == 'quick' else number % 4 != int(which):
            continue
        if name == 'is_no_text':
            with Folder() as folder:
                (folder / 'kernel.cu').write_bytes(b'\xff\xfe')
                results = grade.grade(grader.kernel, '06', folder / 'kernel.cu', grader.toolchain, grader.rubric, SECRET, False)
        else:
            results = grader(make(source))
        # Without keys nothing needs a barrier, so that a kernel whose barriers are gone is right there.
        expect_score(results, 0, 2 if name == 'replaces_the_models_functions' else 0, f'cheat {name}')
        expect(re.search(words, said(results)), f'cheat {name}: does not say {words}: {said(results)[:600]}')
        expect(results['execution_time'] < 60, f"cheat {name}: took {results['execution_time']} s")
        expect(str(ROOT) not in said(results), f'cheat {name}: tells where the grader lies')
    expect(not Path('/tmp/flashsteps_cheated').exists(), 'a submission started a process')


def faults(build, which):
    grader, source = Grader(build, which), solution(which)
    for name, (edits, words, most) in FAULTS[which].items():
        results = grader(edited(source, *edits))
        expect_score(results, 0, most, f'{which}: {name}')
        expect(re.search(words, said(results)), f'{which}: {name}: does not say {words}: {said(results)[:800]}')
        expect('Hint: ' in said(results), f'{which}: {name}: no hint')
        expect(results['execution_time'] < 60, f"{which}: {name}: took {results['execution_time']} s")
        print(f"{which}: {name}: {results['score']:g} points in {results['execution_time']} s")


def earlier(build):
    """The stage before, handed in under the lab's name: its numbers are right, the lab's claim is not, and that is what is said."""
    claims = {'02c': 'bank_conflicts', '02d': 'warp_exchange_bytes', '04': 'global_written.S', '06': 'div_in_loop',
              '08': 'mma_flops', '10b': 'barriers', '10c': 'named_barriers', '10d': 'named_barriers', '10e': 'grid_blocks'}
    order = sorted(KERNELS)
    for before, which in zip(order, order[1:]):
        if which not in claims:
            continue
        source = solution(before)
        results = Grader(build, which)(edited(source, (f'STAGE("{before}"', f'STAGE("{which}"')))
        expect_score(results, 0, 3, f'{before} as {which}')  # of no keys 05 has nothing to divide either
        expect(f'{claims[which]}: counted' in said(results), f'{before} as {which}: {said(results)[:500]}')
        print(f"{before} as {which}: {results['score']:g} points")
    # A stage of the other pass, and a backward pass that is right everywhere and has no tile and no product of tensor cores.
    grader = Grader(build, '09')
    plain = (ROOT / 'tests/kernels/plain_backward.cu').read_text()
    for what, source, words in [
            ('08', edited(solution('08'), ('FLASHSTEPS_STAGE("08"', 'FLASHSTEPS_STAGE("09"')), 'the stage has no backward pass'),
            ('a plain kernel', edited(plain, ('FLASHSTEPS_BACKWARD_STAGE("90"', 'FLASHSTEPS_BACKWARD_STAGE("09"')),
             'and the stage has no tiles')]:
        results = grader(source)
        expect_score(results, 0, 0, f'{what} as 09')
        expect(words in said(results), f'{what} as 09: {said(results)[:500]}')


# --- the rest of the grader's promises ---------------------------------------------------------------------------------------

def promises(build):
    """results.json as Gradescope wants it; secrets; folders; rubrics; several at once."""
    program = [sys.executable, ROOT / 'course/grade.py', KERNELS['06'], '--build', build]
    for which in KERNELS:  # every lab has a rubric and a variation, of 100 points each, and hints for all that can go wrong
        rubric = grade.load_rubric(ROOT / f'course/rubrics/{which}.json', which)
        for part in (rubric, rubric['variation']):
            expect(sum(test['points'] for test in part['tests']) == 100, f'{which}: not 100 points')
            expect(any(test.get('visibility') == 'hidden' for test in part['tests']), f'{which}: nothing is hidden')
            for test in part['tests']:
                expect(test.get('hint') or 'schedules' in test, f"{which}: {test['name']} has no hint")
                expect(not test.get('ledger') or test.get('needs'),
                       f"{which}: {test['name']}: claims of a kernel for visible shapes count")
        expect(rubric.get('always') and rubric['variation'].get('title'), f'{which}: no claim of its own, or no title')

    def run(status, *arguments):
        done = subprocess.run([*program, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        expect(done.returncode == status, f'exit status {done.returncode}, expected {status}: {arguments} {done.stderr.decode()}')
        return done

    with Folder() as folder:
        rubric = json.loads((ROOT / 'course/rubrics/06.json').read_text())
        small = {'lab': '06', 'tests': [t for t in rubric['tests'] if t['name'] in ('whole tiles', 'shapes that are drawn')],
                 'always': rubric['always']}
        (folder / 'small.json').write_text(json.dumps(small))
        (folder / 'good').mkdir()
        (folder / 'good/kernel.cu').write_text(solution('06'))
        (folder / 'poor.cu').write_text(edited(solution('06'), ('l_own == 0.f ? 0.f : divide(1.f, l_own)', '0.5f')))
        (folder / 'out').mkdir()
        run(0, '--submission', folder / 'good', '--submission', folder / 'poor.cu', '--json', folder / 'out', '--secret', 's',
            '--rubric', folder / 'small.json')
        written = sorted(os.listdir(folder / 'out'))
        expect(written == ['000_good.json', '001_poor.cu.json'], f'written: {written}')
        good, poor = (json.loads((folder / 'out' / name).read_text()) for name in written)
        expect(good['score'] == 30 and poor['score'] == 0, f"scores {good['score']} and {poor['score']}")
        for results in (good, poor):
            for key in ('score', 'execution_time', 'tests', 'output', 'visibility'):
                expect(key in results, f'results.json lacks {key}')
            for test in results['tests']:
                for key in ('name', 'score', 'max_score', 'status', 'output', 'visibility'):
                    expect(key in test, f'a test of results.json lacks {key}')
                expect(test['visibility'] in ('visible', 'hidden', 'after_due_date', 'after_published'), 'visibility')
        shown, hidden = poor['tests']
        expect(hidden['visibility'] == 'hidden' and 'Nq' not in hidden['output'], f"a hidden shape is told: {hidden['output']}")
        expect(re.search(r'first: O\[b=0 h=0 i=0 c=\d+\] is \S+, should be \S+ \+- ', shown['output']), shown['output'])
        # The same secret draws the same, another one something else.
        test = small['tests'][1]
        draws = [grade.cases_of(test, grade.random.Random(seed)) for seed in ('a', 'a', 'b')]
        expect(draws[0] == draws[1] and draws[0] != draws[2], 'draws do not follow the secret')
        expect(all(c['heads'] % c['kv_heads'] == 0 and 1 <= c['seqlen_q'] <= 170 for c in draws[0]), f'drawn: {draws[0]}')
        # Bad input: one line, exit status 2, nothing written.
        too_narrow = {'tests': [{'name': 'x', 'points': 1, 'cases': [{'seqlen': 8, 'head_dim': 7}]}]}
        for text, words in [('{', 'small.json'), (json.dumps(small | {'lab': '05'}), 'not of 06'),
                            (json.dumps(small | {'tests': [{'name': 'x', 'points': 1}]}), 'needs a name'),
                            (json.dumps(small | {'always': [{'count': 'nothing', 'is': 0}]}), "no count 'nothing'"),
                            (json.dumps(small | {'always': [{'count': 'div', 'is': 'N +'}]}), 'div: N +'),
                            (json.dumps(small | too_narrow), 'head_dim')]:
            (folder / 'small.json').write_text(text)
            done = run(2, '--submission', folder / 'good', '--secret', 's', '--rubric', folder / 'small.json', '--json',
                       folder / 'never')
            error = done.stderr.decode()
            expect(words in error and error.count('\n') == 1, f'{words}: {error}')
            expect(not (folder / 'never').exists(), 'results of bad input')
        # As Gradescope calls it.
        autograder = folder / 'autograder'
        for name in ('source', 'submission', 'results'):
            (autograder / name).mkdir(parents=True)
        (autograder / 'source/FlashSteps').symlink_to(ROOT)
        (folder / 'small.json').write_text(json.dumps(small))
        (autograder / 'source/lab.conf').write_text(f'LAB=06\nSECRET=s\nBUILD={build}\nOPTIONS="--rubric {folder}/small.json"\n')
        shutil.copy(folder / 'good/kernel.cu', autograder / 'submission/kernel.cu')
        done = subprocess.run([ROOT / 'course/gradescope/run_autograder'], env=os.environ | {'AUTOGRADER': str(autograder)},
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        results = autograder / 'results/results.json'
        expect(done.returncode == 0 and results.exists() and json.loads(results.read_text())['score'] == 30, done.stdout.decode())
        done = run(2, '--submission', folder / 'nobody')
        expect('there is no file or folder' in done.stderr.decode(), done.stderr.decode())
        (folder / 'empty').mkdir()
        done = run(0, '--submission', folder / 'empty', '--secret', 's')
        expect('kernel.cu is missing' in done.stdout.decode(), done.stdout.decode())


def fresh(build):
    """A handout, built from nothing: `./lab test 05` fails with the TODO's words, and passes with the solution put back."""
    which, name = '05', KERNELS['05']
    with Folder() as folder:
        tree = folder / 'student'
        handout.make(ROOT, name, tree)
        environment = {key: value for key, value in os.environ.items() if not key.startswith('FLASHSTEPS')} | {'CUDACXX': ''}

        def lab_test():
            return subprocess.run(['./lab', 'test', which], cwd=tree, env=environment, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT)

        done = lab_test()
        text = done.stdout.decode()
        expect(done.returncode == 1 and f'NOT IMPLEMENTED: {which}: ' in text, f'{done.returncode}: {text[-1500:]}')
        cut = (tree / name).read_text()
        (tree / name).write_text(handout.put_back(cut, which, (ROOT / name).read_text(), name))
        done = lab_test()
        expect(done.returncode == 0, f'with the solution: {done.stdout.decode()[-1500:]}')
        done = subprocess.run(['./lab', 'diff', '04', which], cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        expect(done.returncode == 0 and b'lines of code removed' in done.stdout, done.stdout.decode())
        done = subprocess.run(['./lab', 'grade', which], cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        expect(done.returncode == 2, 'a handout grades')


if __name__ == '__main__':
    cases = {'handouts': handouts, 'lab': lab, 'variation': variation, 'cheats': cheats, 'faults': faults, 'earlier': earlier,
             'promises': promises, 'fresh': fresh}
    case, build_folder, *rest = sys.argv[1:]
    cases[case](Path(build_folder).resolve(), *rest)
    sys.exit(1 if failures else 0)
