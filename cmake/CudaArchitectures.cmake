# The usual variables, in this order: CMAKE_CUDA_ARCHITECTURES, TORCH_CUDA_ARCH_LIST ("8.0;9.0a+PTX", "Ampere Hopper",
# "native"), CUDAARCHS. Default, that of wheels: Ampere, Ada, Hopper with its own instructions, Blackwell, and PTX for all that
# has no machine code, such as sm_110 and whatever comes later.

# Of torch.utils.cpp_extension; names of two parts come first, as one part of them is a name too.
set(torch_generations
    "Kepler+Tesla=3.7" "Kepler=3.5+PTX" "Maxwell+Tegra=5.3" "Maxwell=5.0 5.2+PTX" "Pascal=6.0 6.1+PTX" "Volta+Tegra=7.2"
    "Volta=7.0+PTX" "Turing=7.5+PTX" "Ampere+Tegra=8.7" "Ampere=8.0 8.6+PTX" "Ada=8.9+PTX" "Hopper=9.0+PTX"
    "Blackwell+Tegra=11.0" "Blackwell=10.0 10.3 12.0 12.1+PTX")

# An environment variable that is set to nothing is not set.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(torch_architectures "$ENV{TORCH_CUDA_ARCH_LIST}")
  if(torch_architectures STREQUAL "native")
    set(CMAKE_CUDA_ARCHITECTURES native)
  elseif(NOT torch_architectures STREQUAL "")
    foreach(generation ${torch_generations})
      string(REGEX MATCH "^(.+)=(.+)$" generation ${generation})
      string(REPLACE "${CMAKE_MATCH_1}" "${CMAKE_MATCH_2}" torch_architectures "${torch_architectures}")
    endforeach()
    string(REPLACE " " ";" torch_architectures "${torch_architectures}")
    foreach(entry ${torch_architectures})
      if(NOT entry MATCHES "^([0-9]+)\\.([0-9]+)([af]?)(\\+PTX)?$")
        message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST must list architectures like 8.0, 9.0a or 9.0+PTX, or torch's names of "
                            "generations like Hopper, or be native, got '${entry}' in '$ENV{TORCH_CUDA_ARCH_LIST}'")
      endif()
      set(architecture ${CMAKE_MATCH_1}${CMAKE_MATCH_2}${CMAKE_MATCH_3})
      list(APPEND CMAKE_CUDA_ARCHITECTURES ${architecture}-real)
      if(CMAKE_MATCH_4)
        list(APPEND CMAKE_CUDA_ARCHITECTURES ${architecture}-virtual)
      endif()
    endforeach()
  elseif(NOT "$ENV{CUDAARCHS}" STREQUAL "")
    set(CMAKE_CUDA_ARCHITECTURES $ENV{CUDAARCHS})
  else()
    set(CMAKE_CUDA_ARCHITECTURES 80-real 86-real 89-real 90a-real 100-real 103-real 120-real 90-virtual)
  endif()
  list(REMOVE_DUPLICATES CMAKE_CUDA_ARCHITECTURES)
endif()
