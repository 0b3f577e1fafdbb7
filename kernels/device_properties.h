#pragma once

namespace mrrope {

// The properties of a GPU that launch plans depend on.
struct Device {
    int sms = 0;
    bool pdl = false;    // programmatic dependent launch: sm_90 and later
    bool wgmma = false;  // instructions of sm_90a, which only Hopper has
};

// The current CUDA device's, queried once per device. In the CMake target mrrope::cuda.
Device current_device();

}  // namespace mrrope
