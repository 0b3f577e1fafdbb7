# Installs a build of mrrope, moves the installation, then configures, builds and runs examples/cpp against it.
#   cmake -D SOURCE=… -D MRROPE_BUILD=… -D WORK=… -D GENERATOR=… -D MAKE_PROGRAM=… -D COMPILER=…
#         -D WITH_TORCH=… -D WITH_CUDA=… [-D TORCH_PREFIX=…] -P install_and_build.cmake
function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${MRROPE_BUILD} --prefix ${WORK}/installed)
file(RENAME ${WORK}/installed ${WORK}/moved)

# Without Python, LibTorch must be found in torch.utils.cmake_prefix_path.
set(prefix_path "${WORK}/moved\\;${TORCH_PREFIX}")
run(${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/build -G ${GENERATOR} -D CMAKE_MAKE_PROGRAM=${MAKE_PROGRAM} -D
    CMAKE_CXX_COMPILER=${COMPILER} -D CMAKE_BUILD_TYPE=Release -D "CMAKE_PREFIX_PATH=${prefix_path}" -D
    CMAKE_DISABLE_FIND_PACKAGE_Python=ON -D WITH_TORCH=${WITH_TORCH} -D WITH_CUDA=${WITH_CUDA})
run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${CMAKE_CTEST_COMMAND} --test-dir ${WORK}/build --verbose --no-tests=error)
