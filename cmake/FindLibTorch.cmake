# LibTorch::cpu, LibTorch_VERSION and LibTorch_MINOR (2.11). torch's own TorchConfig.cmake is not used: with a CUDA build it
# insists on a whole CUDA toolkit, and appends flags for architectures that newer nvcc no longer has. torch's CUDA libraries are
# not linked: the ops reach devices and streams through c10's virtual interface, so that one build runs with CPU builds of torch
# and CUDA builds of any version.
#
# Looked for in LibTorch_ROOT, in CMAKE_PREFIX_PATH (torch.utils.cmake_prefix_path too), and in the Python in use.

# Sets `version` to that of the headers (2.11.0), `minor` to 2.11.
function(libtorch_version include_dir version minor)
  set(header ${include_dir}/torch/headeronly/version.h)
  if(EXISTS ${header})
    file(STRINGS ${header} numbers REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]+")
    list(TRANSFORM numbers REPLACE "^.*[A-Z] ([0-9]+).*$" "\\1")
    list(JOIN numbers "." found)
  endif()
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" found_minor "${found}")
  set(${version} "${found}" PARENT_SCOPE)
  set(${minor} "${found_minor}" PARENT_SCOPE)
endfunction()

# Defines `target` for the LibTorch in `folder`.
function(libtorch_import target folder)
  add_library(${target} INTERFACE IMPORTED)
  target_include_directories(${target} SYSTEM INTERFACE ${folder}/include ${folder}/include/torch/csrc/api/include)
  target_link_libraries(${target} INTERFACE ${folder}/lib/libtorch_cpu.so ${folder}/lib/libtorch.so ${folder}/lib/libc10.so)
endfunction()

set(libtorch_hints)
foreach(prefix ${CMAKE_PREFIX_PATH})
  list(APPEND libtorch_hints ${prefix} ${prefix}/../..)
endforeach()
if(NOT LibTorch_ROOT)
  find_package(Python QUIET COMPONENTS Interpreter)
  if(Python_EXECUTABLE)
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
      OUTPUT_VARIABLE libtorch_package OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    list(APPEND libtorch_hints ${libtorch_package})
  endif()
endif()

find_path(LibTorch_INCLUDE_DIR torch/library.h HINTS ${libtorch_hints} PATH_SUFFIXES include)
get_filename_component(LibTorch_FOLDER "${LibTorch_INCLUDE_DIR}" DIRECTORY)
find_library(LibTorch_torch_LIBRARY torch HINTS ${LibTorch_FOLDER}/lib NO_DEFAULT_PATH)
libtorch_version("${LibTorch_INCLUDE_DIR}" LibTorch_VERSION LibTorch_MINOR)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  LibTorch REQUIRED_VARS LibTorch_INCLUDE_DIR LibTorch_torch_LIBRARY LibTorch_MINOR VERSION_VAR LibTorch_VERSION)

if(LibTorch_FOUND AND NOT TARGET LibTorch::cpu)
  libtorch_import(LibTorch::cpu ${LibTorch_FOLDER})
endif()
