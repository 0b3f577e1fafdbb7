# LibTorch::cpu; where torch was built with CUDA, LibTorch::cuda and LibTorch_CUDA_MAJOR too; LibTorch_GOMP, where it brings an
# OpenMP runtime; LibTorch_VERSION. torch's own TorchConfig.cmake is not used: with a CUDA build it insists on a whole CUDA toolkit, and appends
# flags for architectures that newer nvcc no longer has.
#
# Looked for in LibTorch_ROOT, in CMAKE_PREFIX_PATH (torch.utils.cmake_prefix_path too), and in the Python in use.
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
get_filename_component(libtorch_root "${LibTorch_INCLUDE_DIR}" DIRECTORY)
foreach(library c10 torch torch_cpu c10_cuda torch_cuda)
  find_library(LibTorch_${library}_LIBRARY ${library} HINTS ${libtorch_root}/lib NO_DEFAULT_PATH)
endforeach()

# The OpenMP runtime that it brings, by whatever name: those for x86-64 have libgomp-<hash>.so.1.
file(GLOB LibTorch_GOMP ${libtorch_root}/lib/libgomp*.so*)

set(libtorch_version_header "${LibTorch_INCLUDE_DIR}/torch/headeronly/version.h")
if(EXISTS ${libtorch_version_header})
  file(STRINGS ${libtorch_version_header} libtorch_numbers REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]+")
  list(TRANSFORM libtorch_numbers REPLACE "^.*[A-Z] ([0-9]+).*$" "\\1")
  list(JOIN libtorch_numbers "." LibTorch_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  LibTorch REQUIRED_VARS LibTorch_INCLUDE_DIR LibTorch_torch_LIBRARY LibTorch_torch_cpu_LIBRARY LibTorch_c10_LIBRARY
  VERSION_VAR LibTorch_VERSION)

if(LibTorch_FOUND AND NOT TARGET LibTorch::cpu)
  add_library(LibTorch::cpu INTERFACE IMPORTED)
  target_include_directories(LibTorch::cpu SYSTEM INTERFACE ${LibTorch_INCLUDE_DIR}
                                                           ${LibTorch_INCLUDE_DIR}/torch/csrc/api/include)
  target_link_libraries(LibTorch::cpu INTERFACE ${LibTorch_torch_cpu_LIBRARY} ${LibTorch_torch_LIBRARY}
                                                ${LibTorch_c10_LIBRARY})
  if(LibTorch_c10_cuda_LIBRARY AND LibTorch_torch_cuda_LIBRARY)
    # The one place that every distribution of LibTorch has it: the name of the runtime it was linked with.
    file(STRINGS ${LibTorch_c10_cuda_LIBRARY} libtorch_cudart REGEX "libcudart\\.so\\.[0-9]+" LIMIT_COUNT 1)
    string(REGEX REPLACE ".*libcudart\\.so\\.([0-9]+).*" "\\1" LibTorch_CUDA_MAJOR "${libtorch_cudart}")
    add_library(LibTorch::cuda INTERFACE IMPORTED)
    target_link_libraries(LibTorch::cuda INTERFACE LibTorch::cpu ${LibTorch_c10_cuda_LIBRARY}
                                                   ${LibTorch_torch_cuda_LIBRARY})
  endif()
endif()
