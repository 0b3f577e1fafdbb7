#pragma once

#include "mirrored_buffers.h"
#include "mla_rotary_and_cache_case.h"
#include "mla_rotary_case.h"

// Cases of the MLA kernels on the device: their buffers, with the noise around the heads, copied there and back.

namespace mrrope::testing {

inline void mirror_tables(MirroredBuffers& buffers, RotaryCase& rotary) {
    buffers.add(rotary.positions().words());
    buffers.add(rotary.tables().words());
    buffers.add(rotary.indices().words());
}

inline void move_to_device(const MirroredBuffers& buffers, HeadsView& view) {
    if (view.heads == 0) return;
    view.in = buffers.on_device(static_cast<const std::byte*>(view.in));
    view.out = buffers.on_device(static_cast<std::byte*>(view.out));
}

inline void move_to_device(const MirroredBuffers& buffers, RotaryArgs& args) {
    move_to_device(buffers, args.q);
    move_to_device(buffers, args.k);
    args.positions.data = buffers.on_device(static_cast<const std::byte*>(args.positions.data));
    args.table = buffers.on_device(args.table);
    args.choice.index = buffers.on_device(args.choice.index);
}

// Of MlaRotaryCase or MlaRotaryGradientCase.
template <class Case>
class MlaDeviceCase {
public:
    explicit MlaDeviceCase(Case& host) : host_(host) {
        for (HeadBuffer* buffer : host.buffers()) buffers_.add_fetched(buffer->bytes);
        mirror_tables(buffers_, host.rotary());
    }

    auto args() {
        auto args = host_.args();
        move_to_device(buffers_, args.rotary);
        move_to_device(buffers_, args.q_nope.view);
        if constexpr (requires { args.k_nope; }) move_to_device(buffers_, args.k_nope.view);
        return args;
    }

    void fetch() const { buffers_.fetch(); }

private:
    Case& host_;
    MirroredBuffers buffers_;
};

class MlaCacheDeviceCase {
public:
    explicit MlaCacheDeviceCase(MlaRotaryAndCacheCase& host) : host_(host) {
        Heads& q = host.rotary().q();
        buffers_.add_fetched(q.in.bytes);
        buffers_.add_fetched(q.out.bytes);
        buffers_.add_fetched(host.k_rope().bytes);
        buffers_.add_fetched(host.latent().bytes);
        buffers_.add_fetched(host.cache().bytes);
        buffers_.add(host.scale());
        buffers_.add(host.slot_words());
        mirror_tables(buffers_, host.rotary());
    }

    MlaRotaryAndCacheArgs args() {
        MlaRotaryAndCacheArgs args = host_.args();
        // The parts of a row lie beyond a cache without slots.
        if (args.slots.count() == 0) args.rotary.k.out = args.latent.view.out = nullptr;
        move_to_device(buffers_, args.rotary);
        move_to_device(buffers_, args.latent.view);
        args.scale = buffers_.on_device(args.scale);
        args.slots.of_tokens.data = buffers_.on_device(static_cast<const std::byte*>(args.slots.of_tokens.data));
        return args;
    }

    void upload_slots() { buffers_.upload(host_.slot_words()); }
    void fetch() const { buffers_.fetch(); }

private:
    MlaRotaryAndCacheCase& host_;
    MirroredBuffers buffers_;
};

}  // namespace mrrope::testing
