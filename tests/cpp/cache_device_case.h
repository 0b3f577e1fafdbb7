#pragma once

#include <cstdint>

#include "device_memory.h"
#include "mrrope/rotary_and_cache.h"
#include "rotary_and_cache_case.h"

namespace mrrope::testing {

// A case on the device: its buffers and caches, with the noise around them, copied there and back.
class CacheDeviceCase {
public:
    explicit CacheDeviceCase(RotaryAndCacheCase& cache)
        : cache_(cache),
          q_in_(cache.rotary().q().in.bytes),
          q_out_(cache.rotary().q().out.bytes),
          k_(cache.k().bytes),
          v_(cache.v().bytes),
          key_cache_(cache.key_cache().bytes),
          value_cache_(cache.value_cache().bytes),
          key_scales_(cache.key_scales()),
          value_scales_(cache.value_scales()),
          slots_(cache.slot_words()),
          positions_(cache.rotary().positions().words()),
          tables_(cache.rotary().tables().words()),
          indices_(cache.rotary().indices().words()) {}

    RotaryAndCacheArgs args() {
        RotaryAndCacheArgs args = cache_.args();
        const Heads& q = cache_.rotary().q();
        args.rotary.q.in = q_in_.data() + q.in.first_byte;
        args.rotary.q.out =
            cache_.options().rotary.in_place ? q_in_.data() + q.in.first_byte : q_out_.data() + q.out.first_byte;
        args.rotary.positions.data = positions_.data();
        args.rotary.table = tables_.as<uint64_t>();
        if (args.rotary.positions.row_of_pair != nullptr) {
            args.rotary.positions.row_of_pair = args.rotary.table + cache_.rotary().tables().first_row_word();
        }
        TableChoice& choice = args.rotary.choice;
        if (choice.index != nullptr) choice.index = indices_.as<int32_t>();
        if (choice.query_factors != nullptr) {
            choice.query_factors = args.rotary.table + cache_.rotary().tables().first_factor_word();
        }
        args.k.view.in = k_.data() + cache_.k().first_byte;
        args.v.view.in = v_.data() + cache_.v().first_byte;
        args.k.view.out = key_cache_.data() + cache_.key_cache().first_byte;
        args.v.view.out = value_cache_.data() + cache_.value_cache().first_byte;
        if (args.k.scale != nullptr) args.k.scale = key_scales_.as<float>();
        if (args.v.scale != nullptr) args.v.scale = value_scales_.as<float>();
        args.slots.of_tokens.data = slots_.data();
        return args;
    }

    void upload_slots() { slots_.upload(cache_.slot_words()); }

    void fetch() {
        check(cudaDeviceSynchronize());
        q_in_.download(cache_.rotary().q().in.bytes);
        q_out_.download(cache_.rotary().q().out.bytes);
        k_.download(cache_.k().bytes);
        v_.download(cache_.v().bytes);
        key_cache_.download(cache_.key_cache().bytes);
        value_cache_.download(cache_.value_cache().bytes);
    }

private:
    RotaryAndCacheCase& cache_;
    DeviceMemory q_in_, q_out_, k_, v_, key_cache_, value_cache_, key_scales_, value_scales_, slots_, positions_,
        tables_, indices_;
};

}  // namespace mrrope::testing
