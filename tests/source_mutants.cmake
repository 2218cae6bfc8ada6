# Mutants that change what a kernel computes: the source with one text replaced, compiled for the model, linked with the
# conformance suite; each must fail it. (Mutants that leave out a barrier, a wait, a mask … need no compiler: they are in
# mutants_test.cpp.) Built by the target source_mutants, run in the full tier.

add_custom_target(source_mutants)

# flashsteps_mutant(NAME FILE FIND REPLACE): FIND must occur in FILE, or the full tier fails: a mutant cannot rot.
function(flashsteps_mutant name file find replace)
  flashsteps_mutant_of_house(${name} ${file} ${file} "${find}" "${replace}")
endfunction()

# flashsteps_mutant_of_house(NAME KERNEL FILE FIND REPLACE): the same, where FILE is one of common/gpu that KERNEL includes,
# or the source of what it includes.
function(flashsteps_mutant_of_house name kernel file find replace)
  file(READ ${CMAKE_SOURCE_DIR}/${file} source)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/${file})
  string(FIND "${source}" "${find}" position)
  if(position EQUAL -1)
    # A person who edits a kernel still gets it built and tested; the full tier says that the mutant is to be mended.
    add_test(NAME source_mutant.${name} COMMAND sh -c
      "echo 'the text that this mutant replaces is no longer in ${file}: mend tests/source_mutants.cmake'; exit 1")
    set_tests_properties(source_mutant.${name} PROPERTIES LABELS "full")
    return()
  endif()
  string(REPLACE "${find}" "${replace}" source "${source}")
  # The mutated file comes before the repository's: a header in the order of includes, a source in that of linking.
  set(folder ${CMAKE_BINARY_DIR}/mutants/${name})
  set(units ${folder}.cpp)
  if(file STREQUAL kernel)
    file(CONFIGURE OUTPUT ${folder}.cpp CONTENT "@source@" @ONLY)
  else()
    file(CONFIGURE OUTPUT ${folder}/${file} CONTENT "@source@" @ONLY)
    file(CONFIGURE OUTPUT ${folder}.cpp CONTENT "#include \"${kernel}\"\n" @ONLY)
    if(file MATCHES "[.]cpp$")
      list(APPEND units ${folder}/${file})
    endif()
  endif()
  set(target mutant_${name})
  add_library(${target}_kernel OBJECT EXCLUDE_FROM_ALL ${units})
  target_include_directories(${target}_kernel BEFORE PRIVATE ${folder})
  target_link_libraries(${target}_kernel PRIVATE flashsteps_flags)
  target_compile_definitions(${target}_kernel PRIVATE FLASHSTEPS_MODEL_TARGET "FLASHSTEPS_STAGE_FILE=\"${kernel}\"")
  target_compile_options(${target}_kernel PRIVATE ${FLASHSTEPS_MODEL_KERNEL_OPTIONS} -w)
  add_executable(${target} EXCLUDE_FROM_ALL)
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:stage_suite>)
  flashsteps_link(${target} ${target}_kernel)
  target_link_libraries(${target} PRIVATE flashsteps_test_main)
  add_dependencies(source_mutants ${target})
  add_test(NAME source_mutant.${name} COMMAND ${CMAKE_SOURCE_DIR}/tests/expect_killed.sh $<TARGET_FILE:${target}>
    WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
  set_tests_properties(source_mutant.${name} PROPERTIES LABELS "full" TIMEOUT 300)
endfunction()

set(naive 01_naive/kernel.cu)
flashsteps_mutant(01_wrong_kv_head_of_k ${naive} "p.k.offset(b, p.kv_head(h), j)" "p.k.offset(b, h % p.kv_heads, j)")
flashsteps_mutant(01_wrong_kv_head_of_v ${naive} "p.v.offset(b, p.kv_head(h))" "p.v.offset(b, h % p.kv_heads)")
flashsteps_mutant(01_mask_aligned_top_left ${naive} "j > i + p.seqlen_k - p.seqlen_q" "j > i")
flashsteps_mutant(01_no_scale ${naive} "s *= p.scale;" "")
flashsteps_mutant(01_last_key_dropped ${naive} "j < p.seqlen_k; ++j" "j < p.seqlen_k - 1; ++j")
flashsteps_mutant(01_empty_row_not_handled ${naive} "if (m == -INFINITY) m = 0.f;" "")
flashsteps_mutant(01_sum_not_over_the_warp ${naive} "l += __shfl_xor_sync(kFullMask, l, offset);" ";")

set(shared 02_tiled/a_shared_tiles.cu)
flashsteps_mutant(02a_last_tile_dropped ${shared} "j0 < p.seqlen_k; j0 += kBc" "j0 + kBc < p.seqlen_k; j0 += kBc")
flashsteps_mutant(02a_columns_not_zero_filled ${shared} "row < valid_rows && col < valid_cols" "row < valid_rows")
flashsteps_mutant(02a_rows_not_zero_filled ${shared} "row < valid_rows && col < valid_cols" "col < valid_cols")

set(tensor 02_tiled/b_tensor_cores.cu)
flashsteps_mutant(02b_pair_swapped ${tensor} "pack2<T>(to_float(upper[0]), to_float(upper[kCols]))"
  "pack2<T>(to_float(upper[kCols]), to_float(upper[0]))")
flashsteps_mutant(02b_fragment_rows_swapped ${tensor} "a[r][1] = load_pair(q + 8 * D)" "a[r][1] = load_pair(q + 8)")

set(ldmatrix 02_tiled/c_swizzle_ldmatrix.cu)
flashsteps_mutant(02c_v_not_transposed ${ldmatrix} "ldmatrix_x4_trans" "ldmatrix_x4")
flashsteps_mutant(02c_padding_of_p_not_cleared ${ldmatrix} "P[j] = from_float<T>(0.f);" "")
flashsteps_mutant(02c_copied_unswizzled ${ldmatrix} "tile_smem + swizzle<kCols>(row, col)" "tile_smem + row * kCols + col")

set(async 02_tiled/d_cp_async.cu)
flashsteps_mutant(02d_one_buffer_of_v ${async} "V_smem + tile % 2 * kBc * D" "V_smem")
flashsteps_mutant(02d_last_tile_dropped ${async} "tile < tiles_k; ++tile" "tile < tiles_k - 1; ++tile")
flashsteps_mutant(02d_waits_for_one_group_less ${async} "cp_async_wait<1>()" "cp_async_wait<2>()")

set(online 03_online_softmax/kernel.cu)
flashsteps_mutant(03_l_not_rescaled ${online} "l_rmem[x] * fast_exp2(m_rmem[x] - m_finite)" "l_rmem[x]")
flashsteps_mutant(03_o_not_rescaled ${online} "O_rmem[r][c][0] *= upper;" "")
flashsteps_mutant(03_inverse_factor ${online} "l_rmem[x] * fast_exp2(m_rmem[x] - m_finite)"
  "divide(l_rmem[x], fast_exp2(m_rmem[x] - m_finite))")
flashsteps_mutant(03_l_in_base_2 ${online} "m_rmem[x] * kLn2" "m_rmem[x]")
flashsteps_mutant(03_last_tile_dropped ${online} "tile < tiles_k; ++tile" "tile < tiles_k - 1; ++tile")
flashsteps_mutant(03_padding_not_masked ${online} "p.seqlen_k - 1) : p.seqlen_k - 1" "p.seqlen_k + 6) : p.seqlen_k + 6")
flashsteps_mutant(03_empty_row_not_handled ${online} "m_new == -INFINITY ? 0.f : m_new" "m_new")
flashsteps_mutant(03_wrong_kv_head_of_v ${online} "p.v.offset(b, p.kv_head(h))" "p.v.offset(b, h % p.kv_heads)")
flashsteps_mutant(03_p_not_normalised ${online} "pack2<T>(s[0] * l_inverse, s[1] * l_inverse)" "pack2<T>(s[0], s[1])")

set(fa1 04_fa1/kernel.cu)
flashsteps_mutant(04_o_not_rescaled ${fa1} "O_rmem[x][e] *= l_old;" "")
flashsteps_mutant(04_m_in_raw_units ${fa1} "m_new * scale.log2 * kLn2 : m_new" "m_new : m_new")
flashsteps_mutant(04_result_not_stored ${fa1} "if (tile_k == tiles_k - 1) store_quad(" "if (tile_k == tiles_k) store_quad(")
flashsteps_mutant(04_o_not_initialised ${fa1} "store_quad(O_acc + int64_t{i} * p.head_dim + col, {});" "")

set(swap 05_fa2_loop_swap/kernel.cu)
flashsteps_mutant(05_one_warp_merged_four_times ${swap} "PV_smem + w * kBr * D + at" "PV_smem + at")
flashsteps_mutant(05_all_warps_take_the_same_keys ${swap} "K_smem, warp * kSlice" "K_smem, 0")
flashsteps_mutant(05_maximum_of_one_slice ${swap} "max_smem[w * kBr + own_row]" "max_smem[own_row]")

set(deferred 06_deferred_rescale/kernel.cu)
flashsteps_mutant(06_l_not_rescaled ${deferred} "l_own * rescale + sum" "l_own + sum")
flashsteps_mutant(06_never_divided ${deferred} "O_rmem[x][e] *= l_inverse;" "")
flashsteps_mutant(06_l_without_m ${deferred} "m_own * scale.log2 * kLn2 + natural_log(l_own)" "natural_log(l_own)")

set(split 07_warp_split_q/kernel.cu)
flashsteps_mutant(07_l_of_one_lane ${split} "quad_sum(l_rmem[r][half])" "l_rmem[r][half]")
flashsteps_mutant(07_o_not_rescaled ${split} "O_rmem[r][c][2 * half] *= rescale;" "")
flashsteps_mutant(07_mask_off_by_one ${split} "k * 8 + e % 2 > last" "k * 8 + e % 2 >= last")

set(skip 08_causal_skip/kernel.cu)
flashsteps_mutant(08_one_tile_too_few ${skip} "p.seqlen_q) - 1) + 1, kBc)" "p.seqlen_q) - 1), kBc)")
flashsteps_mutant(08_diagonal_not_masked ${skip} "(p.last_key(i0) + 1) / kBc" "(p.last_key(i0) + kBc) / kBc")
flashsteps_mutant(08_large_scores_not_shifted ${skip} "largest > kLargeExponent" "false")

set(backward 09_backward/kernel.cu)
flashsteps_mutant(09_d_dropped ${backward} "= -D_rmem[e % 2]" "= 0.f")
flashsteps_mutant(09_d_of_another_tensor ${backward} "to_float(d_o[c]), to_float(o[c])" "to_float(d_o[c]), to_float(d_o[c])")
flashsteps_mutant(09_no_scale_of_dq ${backward} "pair[0] * p.scale, pair[1] * p.scale" "pair[0], pair[1]")
flashsteps_mutant(09_no_scale_of_dk ${backward} "[e % 4] *= p.scale" "[e % 4] *= 1.f")
flashsteps_mutant(09_one_head_of_the_group ${backward} "const int first_h = kv_head * (p.heads / p.kv_heads);"
  "const int first_h = (kv_head + 1) * (p.heads / p.kv_heads) - 1;")
flashsteps_mutant(09_mask_off_by_one ${backward} "mask_if(r * 16 + e / 2 * 8 > last)" "mask_if(r * 16 + e / 2 * 8 >= last)")
flashsteps_mutant(09_diagonal_not_masked ${backward} "p.last_key(i0) < j0 + kBc - 1" "p.last_key(i0 + kBr - 1) < j0 + kBc - 1")
flashsteps_mutant(09_one_tile_too_few ${backward} "hidden > 0 ? hidden / kBr : 0" "hidden > 0 ? hidden / kBr + 1 : 0")
flashsteps_mutant(09_one_tile_too_many ${backward} "hidden > 0 ? hidden / kBr : 0" "hidden > kBr ? hidden / kBr - 1 : 0")
flashsteps_mutant(09_dq_not_cleared ${backward} "store_quad(acc + 4, {});" "")
flashsteps_mutant(09_l_in_base_e ${backward} "INFINITY : l * kLog2e" "INFINITY : l")
flashsteps_mutant(09_turns_not_awaited ${backward} "turn_wait(turn_at(h, tile_q), last_tile - tile_k);" "")
flashsteps_mutant(09_turns_of_the_first_keys ${backward} "last_tile - tile_k" "tile_k")
flashsteps_mutant(09_causal_not_masked ${backward} "p.causal ? launch_main(no, yes, yes)" "false ? launch_main(no, yes, yes)")
flashsteps_mutant(09_ragged_keys_taken_as_whole ${backward} "p.seqlen_q % kBr == 0 && p.seqlen_k % kBc == 0" "p.seqlen_q % kBr == 0")
flashsteps_mutant(09_ragged_queries_taken_as_whole ${backward} "p.seqlen_q % kBr == 0 && p.seqlen_k % kBc == 0" "p.seqlen_k % kBc == 0")
flashsteps_mutant(09_narrow_heads_taken_as_whole ${backward} "p.head_dim == D &&" "true &&")
flashsteps_mutant(09_last_half_dropped ${backward}
  "multiply_tiles<W::kQueries, kBr, D>(dK_rmem, dS_smem, key0, Q_tile, q0, col0, thread);" "")

set(tma 10_hopper/a_tma_wgmma.cu)
flashsteps_mutant(10a_last_tile_dropped ${tma} "tile_k >= 0; --tile_k" "tile_k > 0; --tile_k")
flashsteps_mutant(10a_wrong_kv_head ${tma} "p.kv_head(h)" "h % p.kv_heads")
flashsteps_mutant(10a_diagonal_not_masked ${tma} "(p.last_key(w.i0) + 1) / kBc" "(p.last_key(w.i0) + kBc) / kBc")
flashsteps_mutant(10a_one_buffer ${tma} "kStages = 2" "kStages = 1")

set(special 10_hopper/b_warp_specialized.cu)
flashsteps_mutant(10b_k_released_too_early ${special} "wgmma_wait<0>(S_rmem);
        release(K_ring, K_empty);" "release(K_ring, K_empty); wgmma_wait<0>(S_rmem);")
flashsteps_mutant(10b_one_warpgroup_empties_k ${special} "&K_empty[s], 4 * kWarpgroups" "&K_empty[s], 4")
flashsteps_mutant(10b_buffers_start_full ${special} "V_ring{0, 1}" "V_ring{0, 0}")

set(pingpong 10_hopper/c_pingpong.cu)
flashsteps_mutant(10c_nobody_begins ${pingpong} "if (warpgroup == kWarpgroups - 1) pass_turn();" "")
flashsteps_mutant(10c_last_turn_kept ${pingpong} "pass_turn();  // the last P V's" "")

set(overlap 10_hopper/d_overlap.cu)
flashsteps_mutant(10d_s_not_waited_for ${overlap} "wgmma_wait<1>(S_rmem)" "wgmma_wait<2>()")
flashsteps_mutant(10d_last_p_v_dropped ${overlap} "start_PV();
      wgmma_wait<0>(O_rmem);" "")
flashsteps_mutant(10d_v_a_tile_ahead ${overlap} "load_V(tile_k, kv_head, b);" "load_V(max(tile_k - 1, 0), kv_head, b);")

set(fast 10_hopper/e_fast.cu)
flashsteps_mutant(10e_rescale_skipped ${fast} "fast_exp2((m_rmem[half] - m) * scale.log2)" "1.f")
flashsteps_mutant(10e_threshold_beyond_half ${fast} "kRescaleThreshold = 8.f" "kRescaleThreshold = 80.f")
flashsteps_mutant(10e_statistics_of_the_next_row_block ${fast} "store(q_done, m_done, l_done)" "store(q_done, m_rmem, l_rmem)")
flashsteps_mutant(10e_o_into_the_next_q ${fast} "store(q_done, m_done, l_done)" "store(q, m_done, l_done)")
flashsteps_mutant(10e_l_of_the_next_row_block ${fast} "      Work w;  // the row block that is done
      w.i0 = work_smem[q].i0, w.bh = work_smem[q].bh;
" "")
flashsteps_mutant(10e_old_maximum_kept ${fast} "m_rmem[0] = m_rmem[1] = -INFINITY;" "")
flashsteps_mutant(10e_old_sum_kept ${fast} "l_rmem[0] = l_rmem[1] = 0.f;" "")
flashsteps_mutant(10e_o_not_cleared ${fast} "is_first ? 0.f : O_rmem[c][e] * rescale[e / 2]" "O_rmem[c][e] * rescale[e / 2]")
flashsteps_mutant(10e_rows_without_keys_not_written ${fast}
  "store_no_keys(O, L, p, b, h, w.i0, min(w.i0 + kBr, p.seqlen_q));" "")
flashsteps_mutant(10e_loaded_for_rows_without_keys ${fast} "if (w.tiles_k == 0) continue;" "")
flashsteps_mutant(10e_last_v_of_the_next_head ${fast} "load_V(0, kv_head_V, b_V);
#pragma" "load_V(0, kv_head, b);
#pragma")
flashsteps_mutant(10e_last_v_of_all_not_loaded ${fast} "load_Q(0, 0);  // word that there is none left
      if (b_V >= 0) load_V(0, kv_head_V, b_V);" "load_Q(0, 0);")
flashsteps_mutant(10e_no_word_of_the_end ${fast} "load_Q(0, 0);  // word that there is none left" "")
flashsteps_mutant(10e_one_buffer_of_q ${fast} "q = Q_ring.stage * kWarpgroups + warpgroup;" "")
flashsteps_mutant(10e_work_of_the_first_buffer ${fast} "w = work_smem[q];" "w = work_smem[warpgroup];")
flashsteps_mutant(10e_work_written_too_late ${fast} "work_smem[q] = w;
          mbarrier_arrive_expect_tx(&Q_full[q], w.bh >= 0 ? kQ * sizeof(T) : 0);"
  "mbarrier_arrive_expect_tx(&Q_full[q], w.bh >= 0 ? kQ * sizeof(T) : 0); work_smem[q] = w;")
flashsteps_mutant(10e_one_warp_fills_o ${fast} "mbarrier_init(&O_full[q], 4);" "mbarrier_init(&O_full[q], 1);")
flashsteps_mutant(10e_q_empty_by_four ${fast} "mbarrier_init(&Q_empty[q], 1);" "mbarrier_init(&Q_empty[q], 4);")
flashsteps_mutant(10e_all_o_to_the_first_rows ${fast} "col, w.i0 + g * 64, h, b" "col, w.i0, h, b")

# The order of row blocks. That it leaves all blocks with as much work is schedule_test's to say.
set(order common/gpu/schedule.h)
flashsteps_mutant_of_house(10e_wrong_partner ${fast} ${order} "tiles_q - 1 - i : i}" "tiles_q - 1 - i : i + 1}")
flashsteps_mutant_of_house(10e_way_back_lost ${fast} ${order} "second ? rest - 1 - n : n" "n")
flashsteps_mutant_of_house(10e_ends_a_row_block_early ${fast} ${order} "n >= rest" "n >= rest - 1")
flashsteps_mutant_of_house(10e_middle_of_the_first_heads ${fast} ${order} "{n - pairs, tiles_q / 2}" "{0, tiles_q / 2}")
set(share common/gpu/schedule.cpp)
flashsteps_mutant_of_house(10e_middle_row_block_dropped ${fast} ${share} "all - pairs - schedule.paired" "pairs - schedule.paired")
flashsteps_mutant_of_house(10e_short_row_block_dropped ${fast} ${share} "schedule.longs + int(pairs) - schedule.paired"
  "schedule.longs")
flashsteps_mutant_of_house(10e_pairs_of_half_a_round ${fast} ${share} "pairs / blocks;" "(pairs + blocks - 1) / blocks;")

# The suite of the backward pass, tried on the plain kernel.
set(plain tests/kernels/plain_backward.cu)
flashsteps_mutant(90_atomics_made_stores ${plain} "atomicAdd(dQ_acc + row * p.head_dim + c, dS * to_float(K[c]))"
  "dQ_acc[row * p.head_dim + c] = dS * to_float(K[c])")
flashsteps_mutant(90_d_dropped ${plain} "p.head_dim) - D[row])" "p.head_dim))")
flashsteps_mutant(90_mask_in_one_product ${plain} "p.seqlen_q)) return false;" "p.seqlen_q)) {
    P = fast_exp(p.scale * dot(Q, K, p.head_dim) - L[row]); dS = 0.f; return L[row] != -INFINITY; }")
flashsteps_mutant(90_no_scale_of_dq ${plain} "p.scale * dQ_acc[row * p.head_dim + c]" "dQ_acc[row * p.head_dim + c]")
flashsteps_mutant(90_no_scale_of_dk ${plain} "p.scale * dK_rmem[c]" "dK_rmem[c]")
flashsteps_mutant(90_group_sum_overwritten ${plain} "h < (g + 1) * group; ++h) {"
  "h < (g + 1) * group; ++h) { for (int c = 0; c < 128; ++c) dK_rmem[c] = dV_rmem[c] = 0.f;")
flashsteps_mutant(90_wrong_kv_head ${plain} "h = g * group; h < (g + 1) * group; ++h" "h = g; h < p.heads; h += p.kv_heads")
flashsteps_mutant(90_strides_of_o_for_do ${plain} "dO + strides.d_o.offset(b, h, i);" "dO + p.o.offset(b, h, i);")
flashsteps_mutant(90_strides_of_q_for_dq ${plain} "dQ += strides.d_q.offset" "dQ += p.q.offset")
flashsteps_mutant(90_dq_not_cleared ${plain} "dQ_acc[row * p.head_dim + c] = 0.f;" ";")
flashsteps_mutant(90_last_query_dropped ${plain} "i < p.seqlen_q; ++i" "i < p.seqlen_q - 1; ++i")
