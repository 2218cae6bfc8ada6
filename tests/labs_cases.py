"""What labs_test.py hands in: cheats in the kernel of lab 06, and kernels with faults for labs 03 to 10e.

A cheat is (what it does to the source, what its author is told); a fault is (the edits, what is told, the most points that may
still be earned)."""

import sys


def edited(source, *edits):
    """The source with the first occurrence of each text replaced; a text that is gone ends the test."""
    for old, new in edits:
        if old not in source:
            sys.exit(f'labs_test: the kernel has no longer: {old}')
        source = source.replace(old, new, 1)
    return source


def before(where, code):
    return lambda source: edited(source, (where, code + '\n' + where))


def change(*edits):
    return lambda source: edited(source, *edits)


def instead(text):
    return lambda source: text


# Places in the kernel: in its host code, in the kernel itself, and before its last lines.
HOST = '  const int tiles_q = ceil_div(p.seqlen_q, kBr);\n  const int blocks_per_head = a.'
KERNEL = '  const int warp = threadIdx.x / 32'
END = 'FLASHSTEPS_STAGE('
OPEN = 'namespace flashsteps::inline FLASHSTEPS_TARGET::stage_06_deferred_rescale {\n'
LOOP = '  volatile int on = 1;\n  while (on) {}'
SOLUTION = '"06_deferred_rescale/kernel.cu"'

CHEATS = {
    # What does not end, or wants too much.
    'compile_error': (change(('l_own * rescale + sum', 'l_own * resale + sum')),
                      r"kernel\.cu:\d+:\d+: error: 'resale' was not"),
    'endless_loop_on_the_host': (before(HOST, LOOP), r'took more than 5 s of processor time'),
    'endless_loop_in_the_kernel': (before(KERNEL, LOOP), r'took more than 5 s of processor time'),
    'endless_compilation': (
        before(END, 'constexpr unsigned long spin() {\n  unsigned long s = 0;\n'
                    '  for (unsigned long i = 0; i < 1ul << 60; ++i) s += i;\n  return s;\n}\nstatic_assert(spin() != 1);'),
        r'Compiling failed|Compiling took|Reading the file'),
    'recurses_for_ever': (
        before(END, 'int deeper(volatile int n) {\n  volatile char c[999];\n  c[n % 999] = 1;\n'
                    '  return n ? deeper(n + 1) + c[3] : 0;\n}\nint depth = deeper(1);'),
        r'SIGSEGV'),
    'asks_for_100_gb': (
        change(('workspaces(const Problem&) {\n  return {};',
                'workspaces(const Problem&) {\n  return {1, {{"S", DType::fp32, 25000000000}}};')),
        r'asks for 1000\d+ bytes of device memory'),
    'has_100_gb': (before(END, 'char large[100ll << 30];'), r'has \d+ bytes of static variables'),
    'allocates_100_gb': (before(HOST, '  volatile char* const large = new char[100ll << 30];\n  large[5] = 1;'),
                         r'calls operator new'),
    # The system.
    'starts_a_process': (before(END, 'int system(const char*);\nint started = system("id > /tmp/flashsteps_cheated");'),
                         r'calls .*system'),
    'starts_a_process_in_c': (lambda s: s + '\nextern "C" int system(const char*);\n', r"'extern' is not allowed"),
    'writes_the_results': (lambda s: '#include <fstream>\n' + s, r'#include <fstream>: a submission may include'),
    'prints_results': (before(END, 'int puts(const char*);\nint printed = puts("{\\"score\\": 100}");'), r'calls .*puts'),
    'exits_early': (before(END, 'void exit(int);\nint gone = (exit(0), 1);'), r'calls .*exit'),
    'throws': (before(HOST, '  throw 1;'), r'calls .*__cxa_throw'),
    # The solution, and how the grader reads.
    'includes_the_solution': (instead(f'#include {SOLUTION}\n'), r'#include "06_deferred'),
    'includes_the_solution_by_a_macro': (instead(f'#define FILE {SOLUTION}\n#include FILE\n'), r'#include FILE'),
    'includes_by_a_digraph': (instead(f'%:include {SOLUTION}\n'), r'#include "06_deferred'),
    'includes_over_two_lines': (instead(f'#incl\\\nude {SOLUTION}\n'), r'not a directive|#include'),
    'includes_a_device': (instead('#include "/dev/zero"\n'), r'#include "/dev/zero"'),
    'hides_in_a_comment': (instead(f'/* */ #include {SOLUTION}\n'), r'// comments only'),
    'includes_behind_a_hidden_comment': (before(END, f"const char quote = '\"'; /* '\"';\n*/ #include {SOLUTION}"),
                                         r'includes kernel\.cu: a submission|failed'),
    'claims_to_be_a_header': (before(KERNEL, '# 1 "common/gpu/gpu.h"\n  asm("nop");'),
                              r'not a directive that a kernel needs'),
    'claims_so_behind_a_hidden_comment': (
        before(KERNEL, "  char quote = '\"'; /* '\"';\n*/ # 1 \"common/gpu/gpu.h\"\n  asm(\"nop\");"),
        r'not a directive that a kernel needs'),
    'claims_so_by_line': (before(KERNEL, '#line 1 "common/gpu/gpu.h"\n  asm("nop");'),
                          r'not a directive that a kernel needs'),
    'changes_the_headers': (
        lambda s: '#define inline __attribute__((no_sanitize("thread"))) inline\n' +
        edited(s, (END, 'inline int quiet() { return 0; }\n' + END)),
        r"'__attribute__' is not allowed"),
    'is_no_text': (instead(None), r'no UTF-8 text'),
    # What the model cannot see.
    'inline_assembly': (before(KERNEL, '  __asm__("nop");'), r"'__asm__' is not allowed"),
    'assembly_from_a_macro': (before(KERNEL, '#define JOIN(a, b) a##b\n  JOIN(as, m)("nop");'), r"'asm' is not allowed"),
    'a_pragma_from_a_macro': (
        before(END, '#define JOIN(a, b) a##b\nJOIN(_Prag, ma)("GCC optimize(\\"O3\\")")'), r'pragma'),
    'not_instrumented': (before(END, '__attribute__((no_sanitize("thread"))) void quiet() {}'),
                         r"'__attribute__' is not allowed"),
    'not_instrumented_either': (before(END, '[[gnu::no_sanitize("thread")]] void quiet() {}'), r"'gnu' is not allowed"),
    'copies_past_the_model': (before(HOST, '  __builtin_memcpy(a.O, a.Q, 64);'), r"'__builtin_memcpy' is not allowed"),
    'divides_uncounted': (change(('divide(1.f, l_own)', '1.f / l_own')), r'use divide\(a, b\)'),
    # The reference, the ledger and the model.
    'calls_the_reference': (
        before(END, '}\nnamespace flashsteps {\nstruct Oracle;\nstruct Inputs;\n'
                    'int make_oracle(const Problem&, const Inputs&);\n'
                    'int asked = make_oracle(Problem{}, *static_cast<Inputs*>(nullptr));\n}\n' + OPEN),
        r'calls flashsteps::make_oracle'),
    'empties_the_ledger': (
        before(END, '}\nnamespace flashsteps::model {\nvoid take_ledger();\n}\n' + OPEN +
                    'void steal() { model::take_ledger(); }'),
        r'calls flashsteps::model::take_ledger'),
    'pokes_into_the_counters': (
        before(HOST, '  *reinterpret_cast<long*>(reinterpret_cast<char*>(&model::run) + 0x200000) = 0;'),
        r'HOST MEMORY: writes 8 bytes'),
    'pokes_before_main': (
        before(END, 'struct Early {\n  Early() { *reinterpret_cast<volatile long*>(&model::run) = 0; }\n} early;'),
        r'before the first test: host code: HOST MEMORY: writes'),
    'computes_on_the_host': (before(HOST, '  O[0] = Q[0];'), r'of the device buffer [OQ], which only kernels can touch'),
    'replaces_the_models_functions': (
        before(END, '}\nnamespace flashsteps::model {\nvoid block_barrier(const char*, int) {}\n}\n' + OPEN), r'RACE'),
    'registers_two_stages': (
        before(END, 'Stage second = {"06", "x", "", kTarget, "x", 80, false, tiles, nullptr, workspaces, nullptr,\n'
                    '                nullptr, nullptr, nullptr};\nStage* const again = register_stage(&second);'),
        r'more than one stage'),
    'registers_another_stage': (change(('FLASHSTEPS_STAGE("06"', 'FLASHSTEPS_STAGE("05"')),
                                r'registers stage 05; this is lab 06'),
    'works_where_l_is_computed': (
        change((END, 'void late(const Problem& p, const ForwardArgs& a, Stream s) {\n'
                     '  p.dtype == DType::fp16 ? forward<fp16_t, 64>(p, a, s) : forward<bf16_t, 64>(p, a, s);\n}\n' + END),
               ('nullptr)\n\n}', 'late)\n\n}')),
        r'computes L does more than that|wrong numbers'),
}
QUICK_CHEATS = ('compile_error', 'starts_a_process', 'includes_the_solution', 'computes_on_the_host')

LEAVES = '  if (threadIdx.x == 17) return;\n'
DEADLOCK = r'DEADLOCK|DIVERGENCE'
ONLY_128 = 'p.seqlen_q == 128 && p.seqlen_k == 128 && !p.causal'
ROWS = '    if (i0 + own_row >= p.seqlen_q) continue;\n'
MERGED = "      __syncthreads();  // every warp's P V and row sums have arrived\n"
STORED = ('if (i0 + row < p.seqlen_q && col < p.head_dim) {', 'if (col < p.head_dim) {')
ROW_OF_L = ('if (t == 0 && i < p.seqlen_q)', 'if (t == 0)')
INVERSE = 'const float l_inverse = l == 0.f ? 0.f : divide(1.f, l);'


def after_wait(indent):
    return [(f'{indent}cp_async_wait<0>();\n', f'{indent}cp_async_wait<0>();\n{LEAVES}')]


FAULTS = {
    '03': {
        'deadlock': ([('  load_tile(0);\n', LEAVES + '  load_tile(0);\n')], DEADLOCK, 0),
        'out_of_bounds': ([('softmax_col == 0 && i0 + row < p.seqlen_q', 'softmax_col == 0')],
                          r'OUT OF BOUNDS: writes .* at m\[', 70),
        'missing_barrier': ([("    __syncthreads();  // the P tile, the factors and every thread's part of the V tile are "
                              'there\n', '')], r'RACE', 0),
        'hard_coded': ([('O_rmem[r][c][0] *= upper;', f'O_rmem[r][c][0] *= {ONLY_128} ? upper : 1.f;')], r'wrong numbers', 30),
    },
    '04': {
        'deadlock': ([('  for (int tile_k = 0;', LEAVES + '  for (int tile_k = 0;')], DEADLOCK, 5),
        'out_of_bounds': ([('  ' + ROWS, '')], r'OUT OF BOUNDS: writes .* at O_acc\[', 60),
        'missing_barrier': ([(MERGED, '')], r'RACE: reads (PV|sum)_smem', 5),
        'hard_coded': ([('const float l_old = l_own * rescale_factor(m_own, m_new, scale);',
                         f'const float l_old = l_own * ({ONLY_128} ? rescale_factor(m_own, m_new, scale) : NAN);')],
                       r'is -?nan', 12),
    },
    '05': {
        'deadlock': (after_wait('      '), DEADLOCK, 5),
        'out_of_bounds': ([(ROWS, '')], r'OUT OF BOUNDS: writes .* at [Oml]\[', 60),
        'missing_barrier': ([(MERGED, '')], r'RACE: reads (PV|sum)_smem', 5),
        'hard_coded': ([('O_rmem[x][e] *= l_inverse;', f'O_rmem[x][e] *= {ONLY_128} ? l_inverse : NAN;')], r'is -?nan', 12),
    },
    '06': {
        'deadlock': (after_wait('      '), DEADLOCK, 5),
        'out_of_bounds': ([(ROWS, '')], r'OUT OF BOUNDS: writes .* at [OL]\[', 60),
        'missing_barrier': ([(MERGED, '')], r'RACE: reads (PV|sum)_smem', 5),
        'hard_coded': ([('l_own == 0.f ? 0.f : divide(1.f, l_own)',
                         f'l_own == 0.f ? 0.f : {ONLY_128} ? divide(1.f, l_own) : 0.f')], r'is -?0, should be', 12),
    },
    '07': {
        'deadlock': (after_wait('    '), DEADLOCK, 5),
        'out_of_bounds': ([STORED], r'OUT OF BOUNDS: writes .* at O\[', 60),
        'missing_barrier': ([("  __syncwarp();  // all lanes have left their part of the warp's rows\n", '')],
                            r'RACE: reads Q_smem', 0),
        'hard_coded': ([(INVERSE, INVERSE.replace('divide(1.f, l)', f'{ONLY_128} ? divide(1.f, l) : NAN'))],
                       r'is -?nan', 12),
    },
    '08': {
        'deadlock': (after_wait('    '), DEADLOCK, 0),
        'out_of_bounds': ([STORED], r'OUT OF BOUNDS: writes .* at O\[', 60),
        'missing_barrier': ([('    __syncthreads();  // V has arrived; all are done with K\n', '')], r'RACE|IN FLIGHT', 0),
        'hard_coded': ([(INVERSE, INVERSE.replace('divide(1.f, l)', f'{ONLY_128} ? divide(1.f, l) : NAN'))],
                       r'is -?nan', 12),
    },
    '09': {
        'deadlock': ([('    __syncthreads();  // dS (and P)', LEAVES + '    __syncthreads();  // dS (and P)')], DEADLOCK, 5),
        'out_of_bounds': ([('if (j0 + row < p.seqlen_k && col < p.head_dim) {', 'if (col < p.head_dim) {')],
                          r'OUT OF BOUNDS: writes .* at d[KV]\[', 60),
        'missing_barrier': ([('    __syncthreads();  // dS (and P) of all keys have arrived\n', '')],
                            r'RACE: reads (dS|P)_smem', 0),
        'hard_coded': ([('*= P_rmem[e / 4][k][e % 4];', f'*= {ONLY_128} ? P_rmem[e / 4][k][e % 4] : NAN;')],
                       r'd[QK]\[.* is -?nan', 12),
    },
    '10a': {
        'deadlock': ([('mbarrier_init(&V_full[s], 1);', 'mbarrier_init(&V_full[s], 2);')], DEADLOCK, 5),
        'out_of_bounds': ([ROW_OF_L], r'OUT OF BOUNDS: writes .* at L\[', 60),
        'missing_barrier': ([('      __syncthreads();  // all are done with the tile: its buffers may be written\n', '')],
                            r'RACE: a TMA load overwrites|BARRIER', 30),
        'hard_coded': ([(INVERSE, INVERSE.replace('divide(1.f, l)', f'{ONLY_128} ? divide(1.f, l) : NAN'))], r'is -?nan', 12),
    },
    '10b': {
        'deadlock': ([('K_ring{0, 1}', 'K_ring{0, 0}')], DEADLOCK, 5),
        'out_of_bounds': ([ROW_OF_L], r'OUT OF BOUNDS: writes .* at L\[', 60),
        'missing_barrier': ([('        mbarrier_wait(&empty[ring.stage], ring.phase);  // all have multiplied by it\n', '')],
                            r'RACE: a TMA load overwrites|BARRIER', 30),
        'hard_coded': ([(INVERSE, INVERSE.replace('divide(1.f, l)', f'{ONLY_128} ? divide(1.f, l) : NAN'))], r'is -?nan', 12),
    },
    '10c': {
        'deadlock': ([('    if (warpgroup == kWarpgroups - 1) pass_turn();  // the first one begins\n', '')], DEADLOCK, 5),
        'out_of_bounds': ([ROW_OF_L], r'OUT OF BOUNDS: writes .* at L\[', 60),
        'missing_barrier': ([('        wgmma_wait<0>(S_rmem);\n', '')], r'REGISTERS|IN FLIGHT|RACE', 5),
        'hard_coded': ([(INVERSE, INVERSE.replace('divide(1.f, l)', f'{ONLY_128} ? divide(1.f, l) : NAN'))], r'is -?nan', 12),
    },
    '10d': {
        'deadlock': ([('        start_PV();\n        pass_turn();\n', '        start_PV();\n')], DEADLOCK, 30),
        'out_of_bounds': ([ROW_OF_L], r'OUT OF BOUNDS: writes .* at L\[', 60),
        'missing_barrier': ([('        wgmma_wait<0>(O_rmem);\n        release(V_ring, V_empty);\n',
                              '        release(V_ring, V_empty);\n')], r'REGISTERS|IN FLIGHT|RACE', 30),
        'hard_coded': ([(INVERSE, INVERSE.replace('divide(1.f, l)', f'{ONLY_128} ? divide(1.f, l) : NAN'))], r'is -?nan', 12),
    },
    '10e': {
        'deadlock': ([('          mbarrier_arrive(&Q_empty[q]);\n', '')], DEADLOCK, 30),
        'out_of_bounds': ([ROW_OF_L], r'OUT OF BOUNDS: writes .* at L\[', 60),
        'missing_barrier': ([('          tma_store_wait_read<0>();\n', '')], r'RACE|IN FLIGHT|NEVER WAITED', 30),
        'hard_coded': ([(INVERSE, INVERSE.replace('divide(1.f, l)', f'{ONLY_128} ? divide(1.f, l) : NAN'))], r'is -?nan', 12),
    },
}
