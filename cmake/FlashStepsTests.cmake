# How a test becomes a ctest entry. tests/CMakeLists.txt tells test writers how to use these functions.

set(FLASHSTEPS_HAS_TESTS OFF)
set(FLASHSTEPS_TESTS_NOTE "left out (FLASHSTEPS_TESTS=OFF)")
if(NOT FLASHSTEPS_TESTS STREQUAL "OFF")
  find_package(GTest QUIET)
  if(GTest_FOUND)
    set(FLASHSTEPS_HAS_TESTS ON)
    set(FLASHSTEPS_TESTS_NOTE "built")
  elseif(FLASHSTEPS_TESTS STREQUAL "ON")
    flashsteps_refuse("GTest not found: install libgtest-dev (Debian, Ubuntu), or set CMAKE_PREFIX_PATH")
  else()
    set(FLASHSTEPS_TESTS_NOTE "left out (no GoogleTest found: install libgtest-dev)")
  endif()
endif()
if(NOT FLASHSTEPS_HAS_TESTS)
  return()
endif()
include(GoogleTest)

# Our own main: a run in which every case was skipped exits with 77, one in which no case ran at all fails.
add_library(flashsteps_test_main STATIC ${CMAKE_SOURCE_DIR}/tests/main.cpp)
target_link_libraries(flashsteps_test_main PUBLIC flashsteps_core GTest::gtest Eigen3::Eigen)
# The work is done in the core and in the kernels; tests themselves are to build fast.
target_compile_options(flashsteps_test_main INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-O1>)

# Skipped by exit status alone. ctest looks for its skip expression before it looks at the exit status, so the
# one that gtest_discover_tests sets would turn a failure after a skipped part into a skip; this one never matches.
set(FLASHSTEPS_TEST_PROPERTIES
  SKIP_RETURN_CODE 77 SKIP_REGULAR_EXPRESSION "^no output skips a test$" TIMEOUT 600)

# flashsteps_test(NAME SOURCE… [LIBRARIES lib…] [KERNELS file.cu…] [OBJECTS object_library…] [PROGRAMS target…]
#                 [LABELS label…] [ONE_ENTRY] [ALL_STAGES])
# One executable; each gtest case is a ctest entry NAME.Suite.Case, or the whole executable one entry, NAME.
# KERNELS are compiled for every target of the build (those named hopper_… for sm_90a alone); OBJECTS are linked whole, ALL_STAGES links every stage;
# PROGRAMS are built first, and found at run time in $FLASHSTEPS_BIN.
function(flashsteps_test name)
  cmake_parse_arguments(ARG "ONE_ENTRY;ALL_STAGES" "" "LIBRARIES;KERNELS;OBJECTS;PROGRAMS;LABELS" ${ARGN})
  add_executable(${name} ${ARG_UNPARSED_ARGUMENTS})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  set(objects ${ARG_OBJECTS})
  if(ARG_ALL_STAGES)
    get_property(stage_objects GLOBAL PROPERTY FLASHSTEPS_OBJECTS)
    list(APPEND objects ${stage_objects})
  endif()
  foreach(kernel IN LISTS ARG_KERNELS)
    get_filename_component(kernel_name ${kernel} NAME_WE)
    if(NOT TARGET kernel_${kernel_name}_model AND NOT TARGET kernel_${kernel_name}_cuda)
      set(only "")
      if(kernel_name MATCHES "^hopper_")
        set(only HOPPER)
      endif()
      set(made "")
      flashsteps_kernel_objects(kernel_${kernel_name} ${kernel} made ${only})
      set_property(GLOBAL PROPERTY FLASHSTEPS_TEST_KERNEL_${kernel_name} ${made})
    endif()
    get_property(made GLOBAL PROPERTY FLASHSTEPS_TEST_KERNEL_${kernel_name})
    list(APPEND objects ${made})
  endforeach()
  flashsteps_link(${name} ${objects})
  target_link_libraries(${name} PRIVATE flashsteps_test_main ${ARG_LIBRARIES})
  if(ARG_PROGRAMS)
    add_dependencies(${name} ${ARG_PROGRAMS})
  endif()
  flashsteps_test_entries(${name} ${name} "${ARG_ONE_ENTRY}" "" "${ARG_LABELS}")
endfunction()

# flashsteps_test_entries(TARGET PREFIX ONE_ENTRY FILTER LABELS)
function(flashsteps_test_entries target prefix one_entry filter labels)
  if("${filter}" STREQUAL "")
    set(filter "*")  # an empty one selects nothing
  endif()
  set(environment "FLASHSTEPS_BIN=${CMAKE_RUNTIME_OUTPUT_DIRECTORY}")
  if(one_entry)
    if(filter)
      set(filter --gtest_filter=${filter})
    endif()
    add_test(NAME ${prefix} COMMAND ${target} ${filter} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
    set_tests_properties(${prefix} PROPERTIES ${FLASHSTEPS_TEST_PROPERTIES}
      ENVIRONMENT "${environment}" LABELS "${labels}")
  else()
    # ctest joins labels with ';' itself; a list does not survive the way through gtest_discover_tests.
    string(REPLACE ";" "\\;" labels "${labels}")
    gtest_discover_tests(${target} TEST_PREFIX ${prefix}. TEST_FILTER "${filter}" DISCOVERY_TIMEOUT 120
      WORKING_DIRECTORY ${CMAKE_SOURCE_DIR}
      PROPERTIES ${FLASHSTEPS_TEST_PROPERTIES} ENVIRONMENT "${environment}" LABELS "${labels}")
  endif()
endfunction()

# flashsteps_stage_tests(SOURCE… [LABELS label…]): tests that go over the registered stages. The sources are
# compiled once and linked with each stage alone, as test_NN, so that `./lab test NN` builds that stage and no
# other. Each case is an entry NN.Suite.Case; the cases with "cuda" in their name share one entry, NN.cuda,
# since starting CUDA costs time. All carry the label stageNN.
function(flashsteps_stage_tests)
  cmake_parse_arguments(ARG "" "" "LABELS" ${ARGN})
  add_library(stage_suite OBJECT ${ARG_UNPARSED_ARGUMENTS})
  target_link_libraries(stage_suite PRIVATE flashsteps_test_main)
  get_property(stages GLOBAL PROPERTY FLASHSTEPS_STAGES)
  foreach(stage IN LISTS stages)
    string(SUBSTRING ${stage} 0 2 number)
    get_property(objects GLOBAL PROPERTY FLASHSTEPS_OBJECTS_${stage})
    if(objects)
      flashsteps_stage_suite(${number} "${ARG_LABELS}" ${objects})
    endif()
  endforeach()
endfunction()

# flashsteps_stage_suite(NUMBER LABELS OBJECTS…): the suite as test_NUMBER, linked with these objects.
function(flashsteps_stage_suite number labels)
  set(target test_${number})
  add_executable(${target})
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:stage_suite>)
  flashsteps_link(${target} ${ARGN})
  target_link_libraries(${target} PRIVATE flashsteps_test_main)
  flashsteps_test_entries(${target} ${number} "" "-*cuda*" "stage${number};${labels}")
  if(FLASHSTEPS_HAS_CUDA)
    flashsteps_test_entries(${target} ${number}.cuda ON "*cuda*" "stage${number};cuda;${labels}")
  else()
    add_test(NAME ${number}.cuda COMMAND sh -c "echo 'skipped because: not built for a card'; exit 77")
    set_tests_properties(${number}.cuda PROPERTIES ${FLASHSTEPS_TEST_PROPERTIES}
      LABELS "stage${number};cuda;${labels}")
  endif()
  set_tests_properties(${number}.cuda PROPERTIES RUN_SERIAL ON)
endfunction()
