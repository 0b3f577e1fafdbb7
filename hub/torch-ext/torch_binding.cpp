// kernel-builder imports the library as a Python module; the op registers itself in bindings/rotary_cos_sin.cpp.
#include "registration.h"  // kernel-builder's

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
