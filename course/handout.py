#!/usr/bin/env python3
"""Makes a lab's handout: a student's repository from this one.

    handout.py KERNEL --out DIR        what `./lab handout 06 --out DIR` calls, with the path of the stage's kernel file

The handout holds the stages before the lab's whole, the lab's own with its solution cut, and nothing of what comes after
it. Three kinds of marks say what is cut; each stands alone in a line, after `//`, `#` or `<!--`:

    BEGIN SOLUTION: what is to be done here   …   END SOLUTION     in a kernel: the lines that are its idea. In the lab's own
                                                                   kernel a TODO takes their place, in those before only the
                                                                   marks go. `HANDOUT: code` within them is a line that
                                                                   only the handout has
    BEGIN STAGE 07   …   END STAGE                                 gone where 07 comes after the lab
    BEGIN INSTRUCTOR   …   END INSTRUCTOR                          gone from every handout

The same input gives the same bytes.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Gone from every handout: what tells solutions or results, and what a student has no use for.
DROPPED = ('.ci/', '.github/', 'course/', 'python/', 'common/capi/', 'docs/results/', 'docs/claims.md', 'docs/cases.md',
           'docs/labs.md', 'docs/python.md')
# Of the tests, what the rules of the house and the suite of a stage need, besides the suite's own sources.
KEPT_TESTS = ('tests/CMakeLists.txt', 'tests/main.cpp', 'tests/stage_suite.h', 'tests/equivalent_mutants.md', 'tests/house_test.sh',
              'tests/data/')
# Sections of lessons that tell results; and, of the lab's own lesson, the solution.
RESULT_SECTIONS = ('Measured',)
SOLUTION_SECTIONS = ('Reading the kernel',)


class Refused(Exception):
    """What was asked for cannot be done: one line."""


def stage_of(path):
    """('06', '') of 06_deferred_rescale/kernel.cu, ('02', 'b') of 02_tiled/b_tensor_cores.cu, None of other paths."""
    found = re.match(r'(\d\d)_[^/]*/(?:([a-z])_)?', str(path))
    return (found[1], found[2] or '') if found else None


def is_text(data):
    return b'\0' not in data[:4096]


def mark(kind, line):
    """The text after a mark of this kind ('BEGIN SOLUTION'), or None."""
    found = re.match(r'\s*(?://|#|<!--)\s*' + kind + r'\b:?[ \t]*(.*?)\s*(?:-->)?$', line)
    return found[1] if found else None


def parts_of(lines, name, where):
    """Splits lines at BEGIN name … END name: yields (None, lines outside) and (text of the mark, lines inside)."""
    inside, text, begin = [], None, 0
    outside = []
    for number, line in enumerate(lines, 1):
        begins, ends = mark('BEGIN ' + name, line), mark('END ' + name, line)
        if begins is not None:
            if text is not None:
                raise Refused(f'{where}:{number}: BEGIN {name} within the one of line {begin}')
            yield None, outside
            outside, inside, text, begin = [], [line], begins, number
        elif ends is not None:
            if text is None:
                raise Refused(f'{where}:{number}: END {name} without BEGIN {name}')
            yield text, inside[1:]
            text = None
        elif text is not None:
            inside.append(line)
        else:
            outside.append(line)
    if text is not None:
        raise Refused(f'{where}:{begin}: BEGIN {name} without END {name}')
    yield None, outside


def solutions_of(source, where):
    """The solution's parts of a kernel file: (what is to be done, its lines)."""
    return [(text, [line for line in lines if mark('HANDOUT', line) is None])
            for text, lines in parts_of(source.split('\n'), 'SOLUTION', where) if text is not None]


def cut_solutions(source, where, lab):
    """A kernel without its solution and with TODOs in its place; where lab is None, whole, without the marks."""
    result = []
    for text, lines in parts_of(source.split('\n'), 'SOLUTION', where):
        if text is None:
            result += lines
        elif lab is None:
            result += [line for line in lines if mark('HANDOUT', line) is None]
        else:
            if not text or re.search(r'["\\%]', text):
                raise Refused(f'{where}: BEGIN SOLUTION must say what is to be done, without ", \\ and %: {text!r}')
            indent = next(re.match(r'\s*', line)[0] for line in lines if line.strip() and not line.startswith('#'))
            result += [indent + code for code in (mark('HANDOUT', line) for line in lines) if code is not None]
            result += [f'{indent}// TODO: {text}', f'{indent}not_implemented("{lab}: {text}");']
    return '\n'.join(result)


def put_back(handout_source, lab, source, where):
    """The handout's kernel with the solution of `source` in the place of its TODOs: what a student hands in."""
    lines, result, at = handout_source.split('\n'), [], 0
    todo = iter(parts_of(source.split('\n'), 'SOLUTION', where))
    for text, part in todo:
        if text is None:
            continue
        given = [code for code in (mark('HANDOUT', line) for line in part) if code is not None]
        end = next(i for i in range(at, len(lines)) if lines[i].strip() == f'not_implemented("{lab}: {text}");')
        result += lines[at:end - 1 - len(given)]
        result += [line for line in part if mark('HANDOUT', line) is None]
        at = end + 1
    return '\n'.join(result + lines[at:])


def cut_shared(source, where, lab):
    """A file that all stages share, without what belongs to later stages and to instructors."""
    lines = source.split('\n')
    lines = [line for text, part in parts_of(lines, 'INSTRUCTOR', where) if text is None for line in part]
    return '\n'.join(line for text, part in parts_of(lines, 'STAGE', where)
                     if text is None or stage_key(text) <= stage_key(lab) for line in part)


def stage_key(name):
    return (name[:2], name[2:])


def cut_sections(lines, drop):
    """Markdown without the sections (## …) whose title drop() says."""
    result, dropping = [], False
    for line in lines:
        if line.startswith('## '):
            dropping = drop(line[3:].strip())
        if not dropping:
            result.append(line)
    return result


def is_of_later_step(title, letter):
    """Whether a section of a lesson with steps ("c: no bank conflicts", "Lab 02c") is of a step after this one."""
    found = re.match(r'(?:Lab \d\d)?([a-z])(?=: |$)', title)
    return bool(found) and found[1] > letter


def cut_links(source, path, exists):
    """Markdown whose links to files that are not there are cut: a row of a table that begins with one goes, elsewhere the
    link's text stays."""
    def leads_somewhere(target):
        if re.match(r'(https?|mailto):|#', target):
            return True
        target = os.path.normpath(os.path.join(os.path.dirname(path), target.split('#')[0]))
        return exists(target)

    result = []
    for line in source.split('\n'):
        first = re.match(r'\|\s*\[[^\]]*\]\(([^)]*)\)', line)
        if first and not leads_somewhere(first[1]):
            continue
        result.append(re.sub(r'\[([^\]]*)\]\(([^)]+)\)', lambda m: m[0] if leads_somewhere(m[2]) else m[1], line))
    return '\n'.join(result)


def cut_rows_of_missing_files(source, exists):
    """Markdown whose tables lack the rows that begin with the name of a kernel file that is not there."""
    return '\n'.join(line for line in source.split('\n')
                     for first in [re.match(r'\|\s*(\d\d_\S+\.cu)\s*\|', line)] if not first or exists(first[1]))


def tracked_files(root):
    """The repository's files, sorted; those of git, or all but what is built where there is no git."""
    if (root / '.git').exists():
        listed = subprocess.run(['git', '-C', root, 'ls-files', '-z'], stdout=subprocess.PIPE, check=True).stdout.decode()
        files = [name for name in listed.split('\0') if name and (root / name).is_file()]
    else:
        skipped = {'build', 'results', '__pycache__', '.cache', '.git'}
        files = [str((Path(folder) / name).relative_to(root)) for folder, folders, names in os.walk(root)
                 for name in names if not skipped & set((Path(folder) / name).relative_to(root).parts[:-1])]
    return sorted(files)


def suite_sources(root):
    """The sources of the suite that is linked with each stage, as tests/CMakeLists.txt names them, and their headers."""
    called = re.search(r'^flashsteps_stage_tests\(([^)]*)\)', (root / 'tests/CMakeLists.txt').read_text(), re.M)
    if not called:
        raise Refused('tests/CMakeLists.txt does not call flashsteps_stage_tests')
    suite = ['tests/' + word for word in called[1].split() if word.endswith('.cpp')]
    for path in suite:  # grows on the way
        for header in re.findall(r'^#include "(\w+\.h)"', (root / path).read_text(), re.M):
            header = 'tests/' + header
            if header not in suite and (root / header).exists():
                suite.append(header)
    return tuple(suite)


def is_kept(path, lab, suite):
    stage = stage_of(path)
    if stage:
        return stage[0] < lab[:2] or (stage[0] == lab[:2] and stage[1] <= (lab[2:] or '~'))
    if path.startswith('tests/'):
        return path.startswith(KEPT_TESTS) or path in suite
    return not path.startswith(DROPPED)


def lab_page(lab, kernel, cut):
    """LAB.md: where to begin."""
    folder = os.path.dirname(kernel)
    todos = [f'- line {number}: {text}' for number, line in enumerate(cut.split('\n'), 1)
             for text in [mark('TODO', line)] if text is not None]
    return '\n'.join([
        f'# Lab {lab}', '',
        f'Write the parts of [{kernel}]({kernel}) that a TODO stands for, and hand in that file:', '', *todos, '',
        f'[The lesson]({folder}/README.md) tells the idea; its section *Lab* says what to keep, what the ledger must show, and has',
        'hints, one step at a time.', '',
        f'    ./lab test {lab}        # a verdict within seconds of each change',
        '    ./lab run            # every stage up to yours, checked and counted',
        f'    build/model/bin/attention count --stage {lab} --batch 1 --heads 1 --seqlen 256 --head-dim 64', '',
        'No GPU is needed: the kernel runs on a CPU model of one, which names races, missing barriers and reads of memory that',
        'nothing wrote ([common/model/README.md](common/model/README.md)). A file that is handed in may include what it includes',
        'now, and nothing else of the repository.', ''])


def make(root, kernel, out):
    """Writes the handout of the lab whose kernel file is `kernel` to the folder `out`.

    Raises Refused with one line."""
    number, letter = stage_of(kernel)
    lab = number + letter
    files = tracked_files(root)
    with_lab = [name for name in files if stage_of(name) and name.endswith('.cu') and
                solutions_of((root / name).read_text(), name)]
    if kernel not in with_lab:
        raise Refused(f'stage {lab} has no lab: its kernel marks no solution; there are: '
                      + ' '.join(''.join(stage_of(name)) for name in with_lab))
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Refused(f'--out: {out} is already there and not an empty folder')
    if not out.parent.is_dir():
        raise Refused(f'--out: there is no folder {out.parent}')
    suite = suite_sources(root)
    kept = [name for name in files if is_kept(name, lab, suite)]
    there = set(kept) | {'LAB.md'} | {str(folder) for name in kept for folder in Path(name).parents}
    lesson = os.path.dirname(kernel) + '/README.md'

    made = Path(tempfile.mkdtemp(prefix=out.name + '.', dir=out.parent))
    try:
        for name in kept:
            data = (root / name).read_bytes()
            if is_text(data):
                text = data.decode()
                if stage_of(name) and name.endswith('.cu'):
                    text = cut_solutions(text, name, lab if name == kernel else None)
                    if name == kernel:
                        (made / 'LAB.md').write_text(lab_page(lab, kernel, text))
                else:
                    text = cut_shared(text, name, lab)
                if name == 'CMakeLists.txt':
                    stages = {name.split('/')[0] for name in kept if stage_of(name)}
                    text = '\n'.join(line for line in text.split('\n')
                                     for stage in [re.match(r'flashsteps_stage\((\S+)\)', line)]
                                     if not stage or stage[1] in stages)
                if name.endswith('.md'):
                    dropped = RESULT_SECTIONS + (SOLUTION_SECTIONS if name == lesson else ())
                    text = '\n'.join(cut_sections(text.split('\n'), lambda title: title in dropped or bool(
                        name == lesson and letter and is_of_later_step(title, letter))))
                    text = cut_rows_of_missing_files(cut_links(text, name, there.__contains__), there.__contains__)
                data = text.encode()
            target = made / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            target.chmod(0o755 if os.access(root / name, os.X_OK) else 0o644)
        for folder, _, _ in os.walk(made):
            os.chmod(folder, 0o755)
        if out.exists():
            out.rmdir()
        made.rename(out)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def main():
    parser = argparse.ArgumentParser(prog='lab handout', usage='./lab handout STAGE --out DIR')
    parser.add_argument('kernel')
    parser.add_argument('--out', required=True)
    options = parser.parse_args()
    try:
        make(Path(__file__).resolve().parent.parent, options.kernel, options.out)
    except (Refused, OSError) as error:
        print(f'lab: {error}', file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main())
