#!/usr/bin/env python3
"""Grades a kernel that was handed in for a lab.

    grade.py KERNEL --build DIR --submission FILE-OR-DIR… [--json FILE-OR-DIR] [--secret TEXT] [--variation] [--rubric FILE]

is what `./lab grade 06 …` calls, with the path of the stage's kernel file and a build folder in which the target `grade` is
built. Writes Gradescope's results.json and prints the same in short. docs/labs.md says what a rubric holds and what is proof
against whom.

Exit status: 0 graded (whatever the points), 2 bad input, 1 the grader itself has failed.
"""

import argparse
import json
import math
import os
import random
import re
import resource
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONGEST_FILE = 256 * 1024
MOST_STATIC = 1024 * 1024
ALLOWED_INCLUDE = re.compile(r'"common/gpu/[a-z0-9_]+\.h"|"common/stage/kernel_stage\.h"')
DIRECTIVES = {'define', 'undef', 'if', 'ifdef', 'ifndef', 'elif', 'elifdef', 'elifndef', 'else', 'endif', 'error', 'warning', ''}
# Words that a kernel has no use for and that reach past what the model sees.
REFUSED_WORDS = re.compile(r'\b(asm|__asm|__asm__|extern|__extension__|__attribute|__attribute__|__declspec|gnu|__gnu__|'
                           r'__builtin_\w+|__sync_\w+|__atomic_\w+|__tsan\w*|__sanitizer\w*|_Pragma|import|module)\b')
# What macros of common/gpu and of the C library put into a kernel's lines.
HARMLESS = re.compile(r'__attribute__\s*\(\(\s*(always_inline|aligned\s*\(\s*\d+\s*\))\s*\)\)|'
                      r'\b__builtin_(inff?|nanf?|huge_valf?|FILE|LINE)\b')
# Sections that an object of a kernel has.
SECTIONS = re.compile(r'\.(text|rodata|data|bss|tbss|tdata|eh_frame|init_array|group|comment|note\.GNU-stack|gcc_except_table|'
                      r'note\.gnu\.property|strtab|shstrtab|symtab|rela?)(\..*)?$')

FAULT_HINTS = {
    'RACE': 'Two threads touch the same shared memory, and no barrier orders them. Which barrier of the step before protects '
            'that array, and do all threads pass it between the two accesses?',
    'IN FLIGHT': 'The data of a cp.async is touched before it has arrived: is it committed, waited for by the thread that '
                 'started it, and is there a barrier before others read it?',
    'NEVER WAITED FOR': 'A cp.async that nothing waits for may land after its buffer is used for something else.',
    'NEVER WRITTEN': 'Memory is read that nothing wrote. Which thread should have written it, and for which rows and columns?',
    'OUT OF BOUNDS': 'Compare the index in the message with the shape: which of rows, columns and padding is not guarded?',
    'DEADLOCK': 'Threads wait at a barrier that others never reach: is it inside an if, or after a return or continue?',
    'DIVERGENCE': 'Threads of one warp or block wait for one another at different lines: a branch holds a barrier, a shuffle '
                  'or an mma that all must reach.',
    'MISALIGNED': 'A 16-byte access needs an address that is a multiple of 16: look at the column and at the row stride.',
    'MASK': 'Warp primitives take all 32 lanes here.',
    'TURN': 'What is summed in a fixed order is touched between turn_wait and turn_pass alone, by the warp whose turn it is.',
    'PROXY': 'TMA and wgmma reach shared memory by another way than ordinary stores do: who stored calls fence_proxy_async, then '
             'all meet, then the copy or the product is started.',
    'BARRIER': 'How many arrive at this barrier in a phase, and how many bytes were announced? Is the buffer waited for before it '
               'is used again, and does the wait name the parity of that phase?',
    'REGISTERS': 'wgmma works on: its registers are left alone between wgmma_fence and the wgmma_wait that covers its group.',
    'HOST MEMORY': 'Kernels use device memory, shared memory and their parameters; host code never touches device memory.',
}
WRONG_HINTS = [
    (r'\bis -?nan', 'NaN comes from 0/0, inf - inf, or from an element that nothing wrote (outputs hold NaN before the run): '
                    'is a row that has seen no key yet kept from -inf - -inf?'),
    (r'first: L\[', 'O is right and L is not, or L goes wrong first: L = m + ln l, in natural units, -inf where no key is seen.'),
    (r'first: (O|d[QKV])\[', 'Look at the first wrong row and column: which tile, which warp and which lane own them?'),
]
LABEL = {'right': 'right', 'wrong': 'wrong numbers', 'fault': 'the model stopped the kernel', 'missing': 'a part is missing',
         'crashed': 'the program ended', 'out_of_time': 'out of time', 'refused': 'refused'}


class BadInput(Exception):
    """One line; exit status 2."""


class Rejected(Exception):
    """The submission cannot be run: what its author is told."""


# --- from a file to a program ------------------------------------------------------------------------------------------------

def splice(source):
    """The logical lines of a source, each with its number: those that end with a backslash are joined with the next."""
    lines, joined, first = [], '', 0
    for number, line in enumerate(source.split('\n'), 1):
        joined, first = (joined, first) if first else ('', number)
        bare = line.rstrip(' \t')
        if bare.endswith('\\'):  # spaces after the backslash do not matter to the compiler
            joined += bare[:-1]
            continue
        lines.append((first, joined + line))
        joined, first = '', 0
    return lines + ([(first, joined)] if first else [])


def check_source(source):
    """Refuses what the text alone shows, with its line. It says early and plainly what an honest author needs to know; what it
    can be fooled about, the compiler's own list of files, the preprocessed text and the object show all the same."""
    found = re.search(r'[^\n\t -~\u00a0-\U0010ffff]', source)
    if found:
        raise Rejected(f'the file holds a control character, {found[0]!r}')
    # The one thing that would mislead what comes later: a directive that gives the lines that follow another file's name.
    joined = '\n'.join(line for _, line in splice(source))
    found = re.search(r'(#|%:)(\s|/\*.*?\*/)*(line\b|\d)', joined, re.S)
    if found:
        raise Rejected(f'{found[0]!r} is not allowed, nor in a comment or string: not a directive that a kernel needs')
    for number, line in splice(source):
        code = re.sub(r'"(\\.|[^"\\])*"', lambda m: m[0] if line.lstrip().startswith(('#', '%:')) else '""', line)
        code = code.split('//')[0] if not re.match(r'\s*(#|%:)\s*include', code) else code
        if '/*' in code or re.search(r'\bu?8?[uUL]?R"', line):
            raise Rejected(f'line {number}: kernels use // comments only, and no raw strings')
        directive = re.match(r'\s*(?:#|%:)\s*(\w*)\s*(.*)', code)
        if not directive:
            continue
        name, rest = directive[1], directive[2].split('//')[0].strip() if directive[1] != 'include' else directive[2].strip()
        if name == 'include':
            if not ALLOWED_INCLUDE.fullmatch(rest.split(' //')[0].strip()):
                raise Rejected(f'line {number}: #include {rest}: a submission may include "common/gpu/….h" and '
                               '"common/stage/kernel_stage.h" alone')
        elif name == 'pragma':
            if not re.match(r'(unroll|once)\b', rest):
                raise Rejected(f'line {number}: #pragma {rest}: allowed is #pragma unroll')
        elif name not in DIRECTIVES:
            raise Rejected(f'line {number}: #{name} {rest}: not a directive that a kernel needs')


def check_preprocessed(text, name):
    """Refuses words in what the preprocessor made of the submission's own lines."""
    file, number = '', 0
    for line in text.split('\n'):
        marker = re.match(r'# (\d+) "((?:\\.|[^"\\])*)"', line)
        if marker:
            number, file = int(marker[1]), marker[2]
            continue
        if file == name:
            if line.lstrip().startswith('#pragma') and not re.match(r'\s*#pragma\s+(unroll|once)\b', line):
                raise Rejected(f'line {number}: {line.strip()}: allowed is #pragma unroll')
            word = REFUSED_WORDS.search(HARMLESS.sub('', re.sub(r'"(\\.|[^"\\])*"', '""', line)))
            if word:
                raise Rejected(f"line {number}: '{word[0]}' is not allowed: a kernel uses what common/gpu offers")
        number += 1


def limit_process(cpu_seconds, memory_mb):
    def apply():
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
        resource.setrlimit(resource.RLIMIT_DATA, (memory_mb << 20, memory_mb << 20))
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, 64 << 20))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return apply


def is_of_hopper(lab):
    return lab >= '10'


class Toolchain:
    """How the build compiles kernels for the model, and what a runner is linked from. `hopper`: of labs 10, whose submissions
    may include what is of compute capability 9.0 alone."""

    def __init__(self, build, hopper=False):
        self.hopper = hopper
        try:
            commands = json.loads((build / 'compile_commands.json').read_text())
            self.link = json.loads((build / 'course/link.json').read_text())
        except OSError as error:
            raise BadInput(f'{build} is no build of this repository with the CPU model: {error}')
        unit = next((c for c in commands if c['file'].endswith('model_units/common_lse.cpp')), None)
        if unit is None:
            raise BadInput(f'{build}: the CPU model was not built')
        words = shlex.split(unit['command'])
        self.compiler = words[0]
        self.flags = []
        skip = False
        for word in words[1:]:
            if skip or word in ('-o', '-c'):
                skip = not skip
            elif not word.startswith('-DFLASHSTEPS_STAGE_FILE=') and word != '-Werror':
                self.flags.append(word)
        self.headers = None

    def run(self, command, work, seconds, memory_mb, what):
        """Runs a tool on the submission under limits; returns its output, or raises Rejected with what it said."""
        environment = {'PATH': os.environ.get('PATH', '/usr/bin:/bin'), 'LC_ALL': 'C', 'TMPDIR': str(work)}
        process = subprocess.Popen(command, cwd=work, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, preexec_fn=limit_process(seconds, memory_mb))
        late = False
        try:
            out, err = process.communicate(timeout=3 * seconds)
        except subprocess.TimeoutExpired:
            late = True
        finally:  # the compiler proper is a child of g++: the whole group ends
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if late:
            process.communicate()
        text = '' if late else err.decode(errors='replace')
        if late or process.returncode in (-signal.SIGKILL, -signal.SIGXCPU) or 'Killed signal' in text or \
                'CPU time limit' in text:
            raise Rejected(f'{what} took more than {seconds} s')
        if process.returncode != 0:
            if 'virtual memory exhausted' in text or 'out of memory' in text:
                raise Rejected(f'{what} took more than {memory_mb} MB of memory')
            errors = [line for line in text.split('\n') if line.strip()]
            short = '\n'.join(line[:240] for line in errors[:40]).replace(str(ROOT) + '/', '')
            raise Rejected(f'{what} failed:\n{short}')
        return out.decode(errors='replace')

    def includes(self):
        """Options that include all that a submission may before its first line, so that no macro of its own changes it."""
        # Not the card's side, and nothing of Hopper where the lab is of an earlier stage.
        left_out = ('cuda_', 'tma_') if self.hopper else ('cuda_', 'tma_', 'hopper')
        names = sorted(str(p.relative_to(ROOT)) for p in (ROOT / 'common/gpu').glob('*.h') if not p.name.startswith(left_out))
        return [word for name in [*names, 'common/stage/kernel_stage.h'] for word in ('-include', name)]

    def allowed_headers(self, work):
        """Every file that the allowed headers bring."""
        if self.headers is None:
            stub = work / 'headers.cpp'
            stub.write_text('')
            self.headers = self.dependencies(stub.name, work) - {stub.name}
        return self.headers

    def dependencies(self, name, work):
        made = self.run([self.compiler, *self.flags, *self.includes(), '-DFLASHSTEPS_STAGE_FILE="x"', '-x', 'c++', '-M', '-MT', 'x',
                         name], work, 20, 700, 'Reading the file')
        return {word.replace('\\ ', ' ') for word in shlex.split(made.replace('\\\n', ' '))[1:]}

    def build(self, source, name, work, limits):
        """Compiles and links a submission; returns the program. `name` is the kernel file's in the repository."""
        if len(source) > LONGEST_FILE:
            raise Rejected(f'the file has {len(source)} bytes; {LONGEST_FILE} are allowed')
        try:
            text = source.decode()
        except UnicodeDecodeError as error:
            raise Rejected(f'the file is no UTF-8 text: {error}')
        text = text.replace('\r\n', '\n')
        check_source(text)
        (work / name).parent.mkdir()
        (work / name).write_text(text)
        seconds, memory_mb = limits['compile_seconds'], limits['compile_memory_mb']
        compile_it = [self.compiler, *self.flags, *self.includes(), f'-DFLASHSTEPS_STAGE_FILE="{name}"', '-x', 'c++',
                      '-fno-diagnostics-color', '-fmax-errors=5', '-w']
        for header in sorted(self.dependencies(name, work) - self.allowed_headers(work) - {name}):
            raise Rejected(f'includes {Path(header).name}: a submission may include "common/gpu/….h" and '
                           '"common/stage/kernel_stage.h" alone')
        check_preprocessed(self.run([*compile_it, '-E', name], work, 20, memory_mb, 'Reading the file'), name)
        self.run([*compile_it, '-c', name, '-o', 'submission.o'], work, seconds, memory_mb, 'Compiling')
        self.check_object(work)
        # From here on nothing of the submission can take the place of anything of the model: all its symbols are local.
        self.run(['ld', '-r', '--force-group-allocation', 'submission.o', '-o', 'joined.o'], work, 20, memory_mb, 'Linking')
        # Its static variables lie together, so that the runner can tell what its host code may write to.
        headers = self.run(['objdump', '-h', 'joined.o'], work, 20, 700, 'Linking')
        renamed = [f'--rename-section={name}=submission_data,alloc,load,data,contents'
                   for name in re.findall(r'^\s*\d+ (\.(?:bss|data)\S*)', headers, re.M) if '.rel.ro' not in name]
        self.run(['objcopy', '--keep-global-symbol=none', *renamed, 'joined.o', 'local.o'], work, 20, memory_mb, 'Linking')
        self.run([self.compiler, '-static-pie', '-o', 'runner', *self.link['runner_objects'].split(';'), 'local.o',
                  *self.link['libraries']], work, 60, memory_mb, 'Linking')
        (work / 'runner').chmod(0o755)
        return work / 'runner'

    def check_object(self, work):
        """Refuses what the object asks of the linker, holds, or computes past the counters."""
        symbols = self.run(['nm', '--undefined-only', 'submission.o'], work, 20, 700, 'Linking').split('\n')
        allowed = [re.compile(line) for line in (ROOT / 'course/allowed_symbols.txt').read_text().split('\n')
                   if line and not line.startswith('#')]
        names = [line.split()[-1] for line in symbols if line.strip()]
        refused = [name for name in names if not any(pattern.fullmatch(name) for pattern in allowed)]
        if refused:
            named = subprocess.run(['c++filt', *refused], stdout=subprocess.PIPE).stdout.decode().strip().split('\n')
            raise Rejected('calls ' + ', '.join(named) + ': a kernel file may call what common/gpu offers, and nothing else'
                           + ('. The compiler makes such a call of a loop over whole arrays; write to them by elements'
                              if {'memcpy', 'memset', 'memmove'} & set(refused) else ''))
        if re.search(r'^\S+ i ', self.run(['nm', 'submission.o'], work, 20, 700, 'Linking'), re.M):
            raise Rejected('chooses functions while it is being loaded (ifunc), which is not allowed')
        headers = self.run(['objdump', '-h', 'submission.o'], work, 20, 700, 'Linking')
        static = 0
        for section, size in re.findall(r'^\s*\d+ (\S+)\s+([0-9a-f]+)', headers, re.M):
            if not SECTIONS.match(section):
                raise Rejected(f'puts something into the section {section}, which a kernel does not need')
            static += int(size, 16) if re.match(r'\.(t?bss|t?data)', section) else 0
        if static > MOST_STATIC:
            raise Rejected(f'has {static} bytes of static variables; {MOST_STATIC} are allowed')
        code = self.run(['objdump', '-d', '--no-show-raw-insn', 'submission.o'], work, 60, 700, 'Reading the object')
        if re.search(r'\s(v?(div|sqrt|rcp|rsqrt)[sp][sd]|fdivr?p?|fdiv\s.*[sdh]\d)\b', code):
            raise Rejected('divides floating-point numbers with / (or takes a root): use divide(a, b), which the ledger counts')


# --- from a program to findings ----------------------------------------------------------------------------------------------

def drawn(value, rng):
    """A value of a draw: [low, high] is a range, {"one_of": […]} a choice, anything else itself."""
    if isinstance(value, list) and len(value) == 2 and all(isinstance(x, int) for x in value):
        return rng.randint(*value)
    if isinstance(value, dict) and set(value) == {'one_of'}:
        return rng.choice(value['one_of'])
    return value


def cases_of(test, rng):
    """The problems of a test, with inputs and schedules that nobody knows before."""
    cases = [dict(case) for case in test.get('cases', [])]
    draw = test.get('draw')
    if draw:
        for _ in range(draw['count']):
            case = {key: drawn(value, rng) for key, value in draw.items() if key not in ('count', 'head_counts')}
            if 'head_counts' in draw:
                case['heads'], case['kv_heads'] = rng.choice(draw['head_counts'])
            cases.append(case)
    cases = [dict(case) for case in cases for _ in range(test.get('schedules', 1))]
    for case in cases:
        case['seed'], case['schedule'] = rng.getrandbits(48), rng.getrandbits(48)
    return cases


def shape_of(case):
    """A case in words."""
    heads = case.get('heads', 1)
    query = case.get('seqlen_q', case.get('seqlen', 0))
    key = case.get('seqlen_k', case.get('seqlen', 0))
    words = [f"batch {case.get('batch', 1)}", f"heads {heads}", f"kv_heads {case.get('kv_heads', heads)}", f'Nq {query}',
             f'Nk {key}', f"d {case.get('head_dim', 64)}", case.get('dtype', 'fp16')]
    if case.get('causal'):
        words.append('causal')
    words += [f'{name} {case[name]}' for name in ('scale', 'layout', 'input') if name in case]
    if case.get('deterministic'):
        words.append('deterministic')
    return ', '.join(words)


def visible_pairs(case):
    query = case.get('seqlen_q', case.get('seqlen', 0))
    key = case.get('seqlen_k', case.get('seqlen', 0))
    if not case.get('causal'):
        return query * key
    return sum(min(max(i + 1 + key - query, 0), key) for i in range(query))


def implausible(case, finding, uses_mma, backward=False):
    """Why right outputs cannot have come about with these counts; '' where they can. A program that computed them elsewhere, or
    reached for the counters, shows here."""
    counts = finding['counts']
    heads, kv_heads = case.get('heads', 1), case.get('kv_heads', case.get('heads', 1))
    key, d, batch = case.get('seqlen_k', case.get('seqlen', 0)), case.get('head_dim', 64), case.get('batch', 1)
    products = 5 if backward else 2  # of each pair and column
    least = 2 * products * batch * heads * d * visible_pairs(case) if uses_mma else 0
    if counts['mma_flops'] < least and not finding.get('windowed'):
        return f"the tensor cores did {counts['mma_flops']} FLOPs; the problem needs {least}"
    for tensor in ('Q', 'K', 'V', 'dO') if backward else ('Q', 'K', 'V'):
        of_query = tensor in ('Q', 'dO')
        rows = batch * heads * case.get('seqlen_q', case.get('seqlen', 0)) if of_query else batch * kv_heads * key
        if visible_pairs(case) == 0 or case.get('causal') or finding.get('windowed'):
            rows = min(rows, 1) if visible_pairs(case) else 0
        if counts['global_read'].get(tensor, 0) < rows * d * 2:
            return f"{tensor} was read less than once: {counts['global_read'].get(tensor, 0)} of {rows * d * 2} bytes"
    lse = finding.get('lse_counts')
    if lse and (set(lse['global_written']) - {'L'} or lse['mma_flops']):
        return 'the function that computes L does more than that: it writes ' + ', '.join(lse['global_written'])
    return ''


def tiles_in_window(case, Br, Bc, window):
    """How many (row block, key tile) pairs hold a visible pair, over all batches and heads."""
    query = case.get('seqlen_q', case.get('seqlen', 0))
    key = case.get('seqlen_k', case.get('seqlen', 0))
    visited = 0
    for first in range(0, query, Br):
        last = min(first + Br, query) - 1
        end = min(max(last + key - query + 1, 0), key) if case.get('causal') else key
        begin = min(max(first + key - query + 1 - window, 0), key)
        visited += max(0, -(-end // Bc) - begin // Bc)
    return visited * case.get('batch', 1) * case.get('heads', 1)


OF_TILES = {'Br', 'Bc', 'Tr', 'Tc', 'visited', 'masked'}  # what a claim may name where the stage has tiles


def names_of(case, finding):
    """What a claim's formula may name: the lessons' symbols."""
    tiles = finding.get('tiles', {})
    query = case.get('seqlen_q', case.get('seqlen', 0))
    key = case.get('seqlen_k', case.get('seqlen', 0))
    d = case.get('head_dim', 64)
    names = {'Nq': query, 'Nk': key, 'd': d, 'D': 64 if d <= 64 else 128, 'e': 2, 'f': 4,
             'n': case.get('batch', 1) * case.get('heads', 1), 'pairs': visible_pairs(case),
             'n_kv': case.get('batch', 1) * case.get('kv_heads', case.get('heads', 1)),
             'ceil': math.ceil, 'min': min, 'max': max}
    if query == key:
        names['N'] = query
    if tiles.get('Br') and tiles.get('Bc'):
        names |= {'Br': tiles['Br'], 'Bc': tiles['Bc'], 'Tr': -(-query // tiles['Br']), 'Tc': -(-key // tiles['Bc'])}
        names |= finding.get('needed_tiles', {})
        if finding.get('windowed'):
            names['visited'] = tiles_in_window(case, tiles['Br'], tiles['Bc'], finding['windowed'])
    return names


def count_of(counts, name):
    """A count by name: "barriers", "global_read", "global_read.K" (0 where the tensor is not touched)."""
    table, _, tensor = name.partition('.')
    if table not in counts:
        raise BadInput(f"rubric: there is no count '{name}'; there are: {', '.join(counts)}")
    return counts[table].get(tensor, 0) if tensor else counts[table]


def failed_claims(claims, case, finding):
    """What the ledger does not show that it must: one line for each."""
    failed = []
    for claim in claims:
        counted = count_of(finding['counts'], claim['count'])
        relation = next((r for r in ('is', 'at_most', 'at_least') if r in claim), None)
        if relation is None:
            raise BadInput(f"rubric: the claim of {claim['count']} needs one of is, at_most, at_least")
        formula = claim[relation]
        if formula == 'predicted':
            if 'predicted' not in finding:
                raise BadInput(f"rubric: no lesson predicts {claim['count']} of {shape_of(case)}: whole tiles, equal lengths, no "
                               'mask')
            wanted = count_of(finding['predicted'], claim['count'])
        else:
            try:
                wanted = eval(str(formula), {'__builtins__': {}}, names_of(case, finding))  # the instructor's own formula
            except NameError as error:
                tiles = finding.get('tiles', {})
                if error.name not in OF_TILES or tiles.get('Br') and tiles.get('Bc'):
                    raise BadInput(f"rubric: {claim['count']}: {formula}: {error}")
                failed.append(f"{claim['count']}: must be {formula}, and the stage has no tiles (its tiles() gives 0 for Br or Bc)")
                continue
            except Exception as error:
                raise BadInput(f"rubric: {claim['count']}: {formula}: {error}")
        if isinstance(counted, dict) or isinstance(wanted, dict):
            holds = relation == 'is' and counted == wanted
        else:
            holds = {'is': counted == wanted, 'at_most': counted <= wanted, 'at_least': counted >= wanted}[relation]
        if not holds:
            why = '' if formula == 'predicted' else f' ({formula})'
            failed.append(f"{claim['count']}: counted {counted}, must be {relation.replace('_', ' ').replace('is', 'exactly')} "
                          f"{wanted}{why}")
    return failed


def hint_of(finding, test, rubric):
    """The hint that fits a failure best: the rubric's own for this message (of wrong numbers with the test's), then the test's,
    then the general one."""
    message = finding['message']
    own = next((diagnosis['hint'] for diagnosis in rubric.get('diagnoses', []) if re.search(diagnosis['match'], message)), '')
    if own:
        return f"{own} {test['hint']}" if finding['outcome'] == 'wrong' and test.get('hint') else own
    if finding['outcome'] == 'fault':
        for label, hint in FAULT_HINTS.items():
            if f': {label}' in message:
                return hint
    if finding['outcome'] == 'missing':
        return 'The TODO of the handout is still there.'
    if finding['outcome'] == 'out_of_time':
        return 'A loop that never ends? The tests are small: a right kernel needs well under a second for each.'
    if finding['outcome'] == 'wrong':
        if test.get('hint'):
            return test['hint']
        return next((hint for pattern, hint in WRONG_HINTS if re.search(pattern, message)), '')
    return ''


def judge_tests(tests, always, plans, findings, rubric, windowed):
    """Gradescope's tests from what the judge found, in the order of the rubric."""
    results, at = [], 0
    for test, cases in zip(tests, plans):
        found, at = findings[at:at + len(cases)], at + len(cases)
        passed, failures, lines, hints = 0, 0, [], []
        for case, finding in zip(cases, found):
            finding['windowed'] = windowed
            problems = []
            if finding['outcome'] == 'right':
                problems = failed_claims(always, case, finding) or failed_claims(test.get('ledger', []), case, finding)
                why = not problems and implausible(case, finding, rubric.get('mma', True), rubric.get('pass') == 'backward')
                if why:
                    finding['outcome'], finding['message'] = 'refused', f'right outputs, but the counters cannot be: {why}'
            if finding['outcome'] == 'right' and not problems:
                passed += 1
                continue
            failures += 1
            if failures > 3:  # the first ones say enough
                continue
            where = shape_of(case) if test.get('visibility', 'visible') == 'visible' else 'a shape that is not told'
            if problems:
                lines += [f'{where}: right, but the ledger:', *('  ' + p for p in problems)]
                hint = next((c['hint'] for c in always if 'hint' in c and failed_claims([c], case, finding)), test.get('hint', ''))
            else:
                lines.append(f"{where}: {LABEL[finding['outcome']]}: {finding['message']}")
                hint = hint_of(finding, test, rubric)
            if hint and hint not in hints:
                hints.append(hint)
        lines += ['Hint: ' + hint for hint in hints]
        if passed < len(cases):
            lines.append(f'{passed} of {len(cases)} right')
        whole = bool(test.get('ledger')) or test.get('schedules', 1) > 1  # a claim holds, or it does not
        share = (passed == len(cases)) if whole else passed / len(cases)
        results.append({'name': test['name'], 'score': round(test['points'] * share, 2), 'max_score': test['points'],
                        'status': 'passed' if passed == len(cases) else 'failed',
                        'output': '\n'.join(lines) or f'{len(cases)} of {len(cases)} right', 'output_format': 'text',
                        'visibility': test.get('visibility', 'visible')})
    for test, result in zip(tests, results):
        needs = test.get('needs')
        if not needs or not result['score']:
            continue
        other = next(r for r in results if r['name'] == needs['test'])
        if other['score'] < needs['share'] * other['max_score']:
            result |= {'score': 0, 'status': 'failed', 'output': f"counts only where at least {needs['share']:.0%} of "
                       f"'{other['name']}' is right"}
    return results


# --- the whole ---------------------------------------------------------------------------------------------------------------

def load_rubric(path, lab):
    try:
        rubric = json.loads(path.read_text())
    except FileNotFoundError:
        raise BadInput(f'lab {lab} has no rubric: there is no file {path}')
    except ValueError as error:
        raise BadInput(f'{path}: {error}')
    for part in [rubric] + ([rubric['variation']] if 'variation' in rubric else []):
        for test in part.get('tests', []):
            if not {'name', 'points'} <= set(test) or not (test.get('cases') or test.get('draw')):
                raise BadInput(f"{path}: a test needs a name, points, and cases or a draw: {test.get('name', test)}")
            if 'needs' in test and test['needs']['test'] not in [other['name'] for other in part['tests']]:
                raise BadInput(f"{path}: {test['name']} needs '{test['needs']['test']}', which is not there")
    if rubric.get('lab') != lab or not rubric.get('tests'):
        raise BadInput(f"{path}: is the rubric of lab {rubric.get('lab')}, not of {lab}, or has no tests")
    rubric['limits'] = {'compile_seconds': 60, 'compile_memory_mb': 700, 'cpu_seconds': 5, 'wall_seconds': 20,
                        'memory_mb': 400} | rubric.get('limits', {})
    return rubric


def find_submission(path, kernel):
    """The one file of a submission: the file itself, or in a folder the kernel by its path or its name, or the only .cu."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise BadInput(f'--submission: there is no file or folder {path}')
    for candidate in (path / kernel, path / Path(kernel).name):
        if candidate.is_file():
            return candidate
    files = sorted(path.glob('*.cu'))
    if len(files) == 1:
        return files[0]
    raise Rejected(f'the file {Path(kernel).name} is missing: hand in your {kernel}')


def grade(kernel, lab, path, toolchain, rubric, secret, use_variation):
    """results.json of one submission."""
    begin = time.monotonic()
    part = rubric['variation'] if use_variation else rubric
    tests = part['tests']
    total = sum(test['points'] for test in tests)
    plans = [cases_of(test, random.Random(f'{secret}/{lab}/{use_variation}/{i}')) for i, test in enumerate(tests)]
    try:
        with tempfile.TemporaryDirectory(prefix='flashsteps-grade-') as folder:
            os.chmod(folder, 0o711)
            work = Path(folder)
            file = find_submission(path, kernel)
            if file.is_symlink() or file.stat().st_size > LONGEST_FILE:
                raise Rejected(f'the file is a link, or has more than {LONGEST_FILE} bytes')
            runner = toolchain.build(file.read_bytes(), kernel, work, rubric['limits'])
            limits = rubric['limits']
            plan = {'runner': str(runner), 'stage': lab, 'pass': rubric.get('pass', 'forward'),
                    'cpu_seconds': limits['cpu_seconds'], 'wall_seconds': limits['wall_seconds'], 'memory_mb': limits['memory_mb'],
                    'variation': part.get('oracle', {}) if use_variation else {},
                    'cases': [case for cases in plans for case in cases]}
            judged = subprocess.run([toolchain.link['judge']], input=json.dumps(plan).encode(), stdout=subprocess.PIPE,
                                    stderr=subprocess.PIPE)
            if judged.returncode != 0:
                raise BadInput(f'the judge refused the plan: {judged.stderr.decode(errors="replace").strip()}')
            findings = json.loads(judged.stdout)
        window = part.get('oracle', {}).get('window', 0) if use_variation else 0
        results = judge_tests(tests, part.get('always', []), plans, findings, rubric, window)
        output = ''
    except Rejected as why:
        output = str(why)
        results = [{'name': test['name'], 'score': 0, 'max_score': test['points'], 'status': 'failed',
                    'output': 'not run: see above', 'output_format': 'text', 'visibility': test.get('visibility', 'visible')}
                   for test in tests]
    return {'score': round(sum(result['score'] for result in results), 2), 'max_score': total,
            'execution_time': round(time.monotonic() - begin, 1), 'output': output, 'output_format': 'text',
            'visibility': 'visible', 'tests': results}


def write_json(path, results):
    """Beside the file, then in its place, so that nobody sees half of one; straight into a device or a pipe."""
    if path.exists() and not path.is_file():
        path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + '\n')
        return
    new = path.with_name(path.name + '.new')
    new.write_text(json.dumps(results, indent=1, ensure_ascii=False) + '\n')
    new.replace(path)


def print_short(name, results):
    print(f"{name}: {results['score']:g} of {results['max_score']:g} points in {results['execution_time']} s")
    if results['output']:
        print('  ' + results['output'].replace('\n', '\n  '))
        return
    for test in results['tests']:
        print(f"  {test['score']:g}/{test['max_score']:g}  {test['name']}")
        if test['status'] != 'passed':
            print('        ' + test['output'].replace('\n', '\n        '))


def main():
    parser = argparse.ArgumentParser(prog='lab grade', usage='./lab grade STAGE --submission FILE-OR-DIR… [--json FILE] '
                                     '[--secret TEXT] [--variation] [--rubric FILE]')
    parser.add_argument('kernel')
    parser.add_argument('--build', type=Path, required=True)
    parser.add_argument('--submission', type=Path, action='append', required=True)
    parser.add_argument('--json', type=Path)
    parser.add_argument('--secret')
    parser.add_argument('--rubric', type=Path)
    parser.add_argument('--variation', action='store_true')
    options = parser.parse_args()
    found = re.match(r'(\d\d)_[^/]*/(?:([a-z])_)?', options.kernel)
    lab = found[1] + (found[2] or '')
    try:
        rubric = load_rubric(options.rubric or ROOT / f'course/rubrics/{lab}.json', lab)
        if options.variation and 'variation' not in rubric:
            raise BadInput(f'the rubric of lab {lab} has no variation')
        several = len(options.submission) > 1
        if options.json and several and not options.json.is_dir():
            raise BadInput('--json: several submissions need a folder that is there')
        secret = options.secret or os.environ.get('FLASHSTEPS_GRADE_SECRET') or rubric.get('secret')
        if not secret:
            secret = secrets.token_hex(8)
            print(f'Shapes and inputs are drawn with --secret {secret}')
        toolchain = Toolchain(options.build, is_of_hopper(lab))
        for i, path in enumerate(options.submission):
            results = grade(options.kernel, lab, path, toolchain, rubric, secret, options.variation)
            if options.json:
                write_json(options.json / f'{i:03}_{path.name}.json' if several else options.json, results)
            print_short(str(path), results)
    except (BadInput, OSError) as error:
        print(f'lab: grade: {error}', file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main())
