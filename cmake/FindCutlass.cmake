# CUTLASS headers: the environment variable or CMake variable CUTLASS_PATH (a checkout, or its include folder), else the
# PyPI package nvidia-cutlass of the Python in use. Gives CUTLASS_INCLUDE_DIR
# and CUTLASS_VERSION.
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
if(EXISTS "${CUTLASS_INCLUDE_DIR}/cutlass/version.h")
  file(STRINGS ${CUTLASS_INCLUDE_DIR}/cutlass/version.h cutlass_numbers REGEX "define CUTLASS_(MAJOR|MINOR|PATCH) [0-9]+")
  list(TRANSFORM cutlass_numbers REPLACE "^.*[A-Z] ([0-9]+).*$" "\\1")
  list(JOIN cutlass_numbers "." CUTLASS_VERSION)
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  Cutlass REQUIRED_VARS CUTLASS_INCLUDE_DIR VERSION_VAR CUTLASS_VERSION
  REASON_FAILURE_MESSAGE "install it with 'pip install --no-deps ${cutlass_requirement}' or set CUTLASS_PATH")
