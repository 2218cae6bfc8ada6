# What is common to all targets of the project: which compilers there are, and how one kernel file becomes a
# model object, a CUDA object and a program.

# flashsteps_refuse(TEXT): stops with one line. The leading space keeps CMake from wrapping it.
function(flashsteps_refuse text)
  message(FATAL_ERROR " FlashSteps: ${text}")
endfunction()

# flashsteps_need(PACKAGE DEBIAN_PACKAGE [ARGUMENT…]): find_package that tells what to install.
macro(flashsteps_need package debian_package)
  find_package(${package} ${ARGN} QUIET)
  if(NOT ${package}_FOUND)
    flashsteps_refuse("${package} not found: install ${debian_package} (Debian, Ubuntu), or set CMAKE_PREFIX_PATH")
  endif()
endmacro()

flashsteps_need(Eigen3 libeigen3-dev 3.3 NO_MODULE)
flashsteps_need(CLI11 libcli11-dev)
flashsteps_need(fmt libfmt-dev)
flashsteps_need(nlohmann_json nlohmann-json3-dev)
find_package(Threads REQUIRED)

# --- CUDA -------------------------------------------------------------------------------------------------
set(FLASHSTEPS_HAS_CUDA OFF)
set(FLASHSTEPS_CUDA_NOTE "left out (FLASHSTEPS_CUDA=OFF)")
if(NOT FLASHSTEPS_CUDA STREQUAL "OFF")
  # Machine code for Ampere and Hopper, and PTX that newer and in-between cards compile at start. Never "native":
  # it fails where there is no card, and hides what the binary can run on. What the user names wins.
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    if(DEFINED ENV{CUDAARCHS})
      set(CMAKE_CUDA_ARCHITECTURES $ENV{CUDAARCHS} CACHE STRING "CUDA architectures" FORCE)
    else()
      set(CMAKE_CUDA_ARCHITECTURES "80-real;80-virtual;90a-real" CACHE STRING "CUDA architectures" FORCE)
    endif()
  endif()
  foreach(arch IN LISTS CMAKE_CUDA_ARCHITECTURES)
    if(NOT arch MATCHES "^([0-9]+)[af]?(-real|-virtual)?$")
      flashsteps_refuse("CMAKE_CUDA_ARCHITECTURES: '${arch}' is not accepted; name architectures by number, 80 or newer, as in 80-real;90a-real")
    elseif(CMAKE_MATCH_1 LESS 80)
      flashsteps_refuse("CMAKE_CUDA_ARCHITECTURES: ${arch} is too old; cp.async and bf16 need 80 or newer")
    endif()
  endforeach()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.0)
      set(FLASHSTEPS_CUDA_NOTE "left out (nvcc ${CMAKE_CUDA_COMPILER_VERSION} is too old: C++20 needs 12.0)")
    else()
      # CMake before 3.26 does not know that nvcc speaks C++20.
      if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
        set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
        set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
      endif()
      set(CMAKE_CUDA_STANDARD 20)
      set(CMAKE_CUDA_STANDARD_REQUIRED ON)
      set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
      find_package(CUDAToolkit REQUIRED)
      set(FLASHSTEPS_HAS_CUDA ON)
      set(FLASHSTEPS_CUDA_NOTE "nvcc ${CMAKE_CUDA_COMPILER_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}")
    endif()
  else()
    find_program(FLASHSTEPS_NVCC nvcc NO_CMAKE_PATH NO_CMAKE_SYSTEM_PATH)  # where a shell would find it
    mark_as_advanced(FLASHSTEPS_NVCC)
    if(FLASHSTEPS_NVCC)
      set(FLASHSTEPS_CUDA_NOTE "left out (${FLASHSTEPS_NVCC} compiles nothing here; see CMakeFiles/CMakeError.log)")
    else()
      set(FLASHSTEPS_CUDA_NOTE "left out (no nvcc found)")
    endif()
  endif()
  if(FLASHSTEPS_CUDA STREQUAL "ON" AND NOT FLASHSTEPS_HAS_CUDA)
    flashsteps_refuse("FLASHSTEPS_CUDA=ON, but CUDA is ${FLASHSTEPS_CUDA_NOTE}; install the CUDA Toolkit, or set CUDACXX")
  endif()
endif()

# --- the CPU model ----------------------------------------------------------------------------------------
set(FLASHSTEPS_HAS_MODEL OFF)
set(FLASHSTEPS_MODEL_NOTE "left out (FLASHSTEPS_MODEL=OFF)")
if(NOT FLASHSTEPS_MODEL STREQUAL "OFF")
  set(Boost_USE_STATIC_LIBS ON)
  find_package(Boost QUIET CONFIG COMPONENTS context)
  if(NOT TARGET Boost::context)
    set(FLASHSTEPS_MODEL_NOTE "left out (no Boost.Context found: install libboost-context-dev)")
  elseif(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    set(FLASHSTEPS_MODEL_NOTE "left out (it needs g++: the ledger counts the accesses that GCC keeps)")
  elseif(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux" OR NOT CMAKE_SIZEOF_VOID_P EQUAL 8)
    set(FLASHSTEPS_MODEL_NOTE "left out (it needs a 64-bit Linux)")
  else()
    set(FLASHSTEPS_HAS_MODEL ON)
    set(FLASHSTEPS_MODEL_NOTE "built with g++ ${CMAKE_CXX_COMPILER_VERSION}")
  endif()
  if(FLASHSTEPS_MODEL STREQUAL "ON" AND NOT FLASHSTEPS_HAS_MODEL)
    flashsteps_refuse("FLASHSTEPS_MODEL=ON, but the CPU model is ${FLASHSTEPS_MODEL_NOTE}")
  endif()
endif()
if(NOT FLASHSTEPS_HAS_CUDA AND NOT FLASHSTEPS_HAS_MODEL)
  flashsteps_refuse("nothing to build for: CUDA is ${FLASHSTEPS_CUDA_NOTE}; the CPU model is ${FLASHSTEPS_MODEL_NOTE}")
endif()

# --- flags ------------------------------------------------------------------------------------------------
add_library(flashsteps_flags INTERFACE)
target_include_directories(flashsteps_flags INTERFACE ${CMAKE_SOURCE_DIR})
target_compile_definitions(flashsteps_flags INTERFACE
  $<$<BOOL:${FLASHSTEPS_HAS_CUDA}>:FLASHSTEPS_HAS_CUDA>
  $<$<BOOL:${FLASHSTEPS_HAS_MODEL}>:FLASHSTEPS_HAS_MODEL>)
target_compile_options(flashsteps_flags INTERFACE
  # Paths in messages are relative to the repository.
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -ffile-prefix-map=${CMAKE_SOURCE_DIR}/=>
  # GCC 12 warns of std::string's own operator+ (its bug 105651).
  $<$<AND:$<COMPILE_LANG_AND_ID:CXX,GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Wno-restrict>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${FLASHSTEPS_WERROR}>>:-Werror>
  $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra --expt-relaxed-constexpr>
  $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${FLASHSTEPS_WERROR}>>:-Werror=all-warnings>)

# One pinned level for kernels on the model: the ledger counts the accesses that the compiler keeps. The
# compiler's thread-sanitizer pass turns every load and store into a call; the model, not the sanitizer's
# runtime, supplies those calls. No contraction: a*b+c rounds as it is written.
set(FLASHSTEPS_MODEL_KERNEL_OPTIONS
  -O1 -fsanitize=thread --param=tsan-instrument-func-entry-exit=0 -fno-tree-vectorize -ffp-contract=off
  -Wno-unknown-pragmas -Wno-tsan)

# wgmma, TMA and setmaxnreg are there for sm_90a alone, and kernels that use them are compiled for nothing else.
set(FLASHSTEPS_HOPPER_ARCHITECTURE "")
foreach(arch IN LISTS CMAKE_CUDA_ARCHITECTURES)
  if(arch MATCHES "^90a?(-real|-virtual)?$")
    set(FLASHSTEPS_HOPPER_ARCHITECTURE 90a-real)
  endif()
endforeach()

# flashsteps_kernel_objects(NAME FILE OUT_VAR [HOPPER]): objects of one kernel file, for every target of this build.
# FILE is relative to the repository. Appends the object libraries to OUT_VAR. HOPPER: for a card the file is
# compiled for sm_90a alone, and left out, with a word, where that is not among the architectures.
function(flashsteps_kernel_objects name file out)
  cmake_parse_arguments(ARG "HOPPER" "" "" ${ARGN})
  set(objects ${${out}})
  if(FLASHSTEPS_HAS_MODEL)
    # CMake fixes a source's language for the whole directory, so the model gets a source of its own.
    set(unit ${CMAKE_BINARY_DIR}/model_units/${name}.cpp)
    file(CONFIGURE OUTPUT ${unit} CONTENT "#include \"@file@\"\n" @ONLY)
    add_library(${name}_model OBJECT ${unit})
    target_link_libraries(${name}_model PRIVATE flashsteps_flags)
    target_compile_definitions(${name}_model PRIVATE FLASHSTEPS_MODEL_TARGET "FLASHSTEPS_STAGE_FILE=\"${file}\"")
    target_compile_options(${name}_model PRIVATE ${FLASHSTEPS_MODEL_KERNEL_OPTIONS})
    list(APPEND objects ${name}_model)
  endif()
  if(FLASHSTEPS_HAS_CUDA AND ARG_HOPPER AND NOT FLASHSTEPS_HOPPER_ARCHITECTURE)
    message(STATUS "FlashSteps: ${file} left out for CUDA (it needs 90a; the architectures are ${CMAKE_CUDA_ARCHITECTURES})")
  elseif(FLASHSTEPS_HAS_CUDA)
    add_library(${name}_cuda OBJECT ${CMAKE_SOURCE_DIR}/${file})
    set_source_files_properties(${CMAKE_SOURCE_DIR}/${file} PROPERTIES LANGUAGE CUDA)
    # Keeps what ptxas says (registers, spills, notes) beside the object, for the test that reads it.
    set_target_properties(${name}_cuda PROPERTIES
      RULE_LAUNCH_COMPILE "${CMAKE_SOURCE_DIR}/cmake/keep_ptxas_log.sh <OBJECT>")
    target_link_libraries(${name}_cuda PRIVATE flashsteps_flags)
    if(ARG_HOPPER)
      set_target_properties(${name}_cuda PROPERTIES CUDA_ARCHITECTURES ${FLASHSTEPS_HOPPER_ARCHITECTURE})
    endif()
    target_compile_options(${name}_cuda PRIVATE -Xptxas=-v)
    target_compile_definitions(${name}_cuda PRIVATE "FLASHSTEPS_STAGE_FILE=\"${file}\"")
    list(APPEND objects ${name}_cuda)
  endif()
  set(${out} ${objects} PARENT_SCOPE)
endfunction()

# flashsteps_link(TARGET OBJECT_LIBRARIES…): links an executable with the house and with these objects. Objects
# are linked whole, so that their stages register themselves.
function(flashsteps_link target)
  foreach(object IN LISTS ARGN)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${object}>)
  endforeach()
  target_link_libraries(${target} PRIVATE flashsteps_core)
endfunction()

# flashsteps_stage(DIRECTORY): every .cu in it is a step of the stage; all of them make the stage's program. Those of
# stage 10 are for Hopper alone.
function(flashsteps_stage directory)
  string(SUBSTRING ${directory} 0 2 number)
  file(GLOB kernels RELATIVE ${CMAKE_SOURCE_DIR} CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/${directory}/*.cu)
  if(NOT kernels)
    flashsteps_refuse("stage ${directory} has no kernel: no .cu file is in its directory")
  endif()
  set(objects "")
  set(only "")
  if(number STREQUAL "10")
    set(only HOPPER)
  endif()
  foreach(kernel IN LISTS kernels)
    get_filename_component(step ${kernel} NAME_WE)
    set(name stage_${number}_${step})
    flashsteps_kernel_objects(${name} ${kernel} objects ${only})
  endforeach()
  set_property(GLOBAL PROPERTY FLASHSTEPS_OBJECTS_${directory} ${objects})
  set_property(GLOBAL APPEND PROPERTY FLASHSTEPS_STAGES ${directory})
  set_property(GLOBAL APPEND PROPERTY FLASHSTEPS_OBJECTS ${objects})
endfunction()

# The programs: one with every stage, and one for each stage.
function(flashsteps_programs)
  get_property(stages GLOBAL PROPERTY FLASHSTEPS_STAGES)
  get_property(all GLOBAL PROPERTY FLASHSTEPS_OBJECTS)
  add_executable(attention)
  flashsteps_link(attention ${all})
  target_link_libraries(attention PRIVATE flashsteps_cli)
  foreach(stage IN LISTS stages)
    get_property(objects GLOBAL PROPERTY FLASHSTEPS_OBJECTS_${stage})
    if(objects)  # it was built for some target
      add_executable(${stage})
      flashsteps_link(${stage} ${objects})
      target_link_libraries(${stage} PRIVATE flashsteps_cli)
    endif()
  endforeach()
endfunction()

function(flashsteps_summary)
  message(STATUS "FlashSteps: CUDA ${FLASHSTEPS_CUDA_NOTE}")
  message(STATUS "FlashSteps: CPU model ${FLASHSTEPS_MODEL_NOTE}")
  message(STATUS "FlashSteps: tests ${FLASHSTEPS_TESTS_NOTE}")
endfunction()
