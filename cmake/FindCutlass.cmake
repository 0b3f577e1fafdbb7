# CUTLASS headers: the environment variable or CMake variable CUTLASS_PATH (a checkout, or its include folder), else the
# PyPI package nvidia-cutlass of the Python in use. Gives CUTLASS_INCLUDE_DIR.
if(NOT CUTLASS_PATH)
  set(CUTLASS_PATH "$ENV{CUTLASS_PATH}")
endif()
if(NOT CUTLASS_PATH)
  find_package(Python QUIET COMPONENTS Interpreter)
  if(Python_EXECUTABLE)
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c "import importlib.util as u; print(u.find_spec('cutlass_library').submodule_search_locations[0])"
      OUTPUT_VARIABLE cutlass_package OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
endif()
find_path(
  CUTLASS_INCLUDE_DIR cutlass/cutlass.h HINTS ${CUTLASS_PATH} ${CUTLASS_PATH}/include ${cutlass_package}/source/include)
file(STRINGS ${CMAKE_CURRENT_LIST_DIR}/cutlass-requirement.txt cutlass_requirement)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  Cutlass REQUIRED_VARS CUTLASS_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "install it with 'pip install --no-deps ${cutlass_requirement}' or set CUTLASS_PATH")
