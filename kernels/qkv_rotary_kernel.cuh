#pragma once

// Enables PDL in CUTLASS's mainloop and epilogue.
#define CUTLASS_ENABLE_GDC_FOR_SM90

// Only the headers for Hopper, in the order they depend on each other: those for all architectures take longer to parse
// than the kernels to compile.
// clang-format off
#include <cutlass/cutlass.h>
#include <cutlass/device_kernel.h>
#include <cutlass/cluster_launch.hpp>
#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_mma_decl.hpp>
#include <cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized.hpp>
#include <cutlass/gemm/collective/collective_builder_decl.hpp>
#include <cutlass/gemm/collective/builders/sm90_gmma_builder.inl>
#include <cutlass/gemm/kernel/gemm_universal_decl.h>
#include <cutlass/gemm/kernel/tile_scheduler.hpp>
#include <cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_pingpong.hpp>
// clang-format on

#include <stdexcept>
#include <string>
#include <type_traits>

#include "device/dependent_launch.cuh"
#include "device/rotary_epilogue.cuh"
#include "device/transposed_rotary_epilogue.cuh"
#include "device_properties.h"
#include "qkv_rotary_launch.h"

// CUTLASS's persistent warp-specialized pingpong GEMM for Hopper: a producer warp group loads tiles of x and weight by
// TMA, and two consumer warp groups multiply them (wgmma), rotate the accumulators and store them.

namespace mrrope {

// x weight^T: rows are tokens, columns are components.
template <QkvKernel kernel, class Element>
struct TokensByComponents {
    using Tile = cute::Shape<cute::Int<kernel.tile_tokens>, cute::Int<qkv_tile>, cute::_64>;
    using Rotation = RotaryEpilogue<Element, kernel.pairing>;
    static constexpr int columns = epilogue_columns(kernel.pairing);
    using EpilogueTile = cute::Shape<cute::_64, cute::Int<columns>>;
    using EpiloguePolicy = cutlass::epilogue::Sm90TmaWarpSpecialized<
        /*StagesC=*/1, /*StagesD=*/2, /*FragmentSize=*/columns / 2, /*ReuseSmemC=*/false, /*DelayTmaStore=*/true>;
    using Epilogue = typename cutlass::epilogue::collective::detail::Sm90TmaBuilderImpl<
        Tile, EpilogueTile, float, float, void, cutlass::layout::RowMajor, 8, Element, cutlass::layout::RowMajor, 8,
        Rotation, EpiloguePolicy>::CollectiveOp;

    template <class Arguments>
    static void fill(Arguments& arguments, const QkvRotaryArgs& args) {
        const auto rows = static_cast<int>(args.rows());
        arguments.problem_shape = {rows, args.outputs(), args.inputs, 1};
        arguments.mainloop.ptr_A = static_cast<const Element*>(args.x);
        cute::get<0>(arguments.mainloop.dA) = args.x_stride;
        arguments.mainloop.ptr_B = static_cast<const Element*>(args.weight);
        cute::get<0>(arguments.mainloop.dB) = args.weight_stride;
        cute::get<0>(arguments.epilogue.dD) = args.outputs();
        arguments.epilogue.thread = EpilogueRotation<Element>::of(args);
    }
};

// weight x^T: rows are components, columns are tokens.
template <QkvKernel kernel, class Element>
struct ComponentsByTokens {
    using Tile = cute::Shape<cute::Int<qkv_tile>, cute::Int<kernel.tile_tokens>, cute::_64>;
    using EpilogueTile = cute::Shape<cute::_64, cute::Int<kernel.tile_tokens / 2>>;
    // One stage for each of the tile's 2 x 2 epilogue tiles: none waits for another's store.
    using EpiloguePolicy = cutlass::epilogue::Sm90TmaWarpSpecialized<
        /*StagesC=*/1, /*StagesD=*/4, /*FragmentSize=*/kernel.tile_tokens / 4, /*ReuseSmemC=*/false,
        /*DelayTmaStore=*/true>;
    using Store = typename cutlass::epilogue::collective::detail::Sm90TmaBuilderImpl<
        Tile, EpilogueTile, float, float, void, cutlass::layout::ColumnMajor, 8, Element, cutlass::layout::ColumnMajor,
        8, cutlass::epilogue::fusion::Sm90AccFetch, EpiloguePolicy>::CollectiveOp;
    using Epilogue = TransposedRotaryEpilogue<Store, Element>;

    template <class Arguments>
    static void fill(Arguments& arguments, const QkvRotaryArgs& args) {
        const auto rows = static_cast<int>(args.rows());
        arguments.problem_shape = {args.outputs(), rows, args.inputs, 1};
        arguments.mainloop.ptr_A = static_cast<const Element*>(args.weight);
        cute::get<0>(arguments.mainloop.dA) = args.weight_stride;
        arguments.mainloop.ptr_B = static_cast<const Element*>(args.x);
        cute::get<0>(arguments.mainloop.dB) = args.x_stride;
        cute::get<1>(arguments.epilogue.dD) = args.outputs();
        arguments.epilogue.rotation = EpilogueRotation<Element>::of(args);
    }
};

template <QkvKernel kernel, class Element>
struct QkvProjection {
    using Product =
        std::conditional_t<kernel.transposed, ComponentsByTokens<kernel, Element>, TokensByComponents<kernel, Element>>;
    // Two tiles along M share the tile of B by TMA multicast.
    using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
    using Epilogue = typename Product::Epilogue;
    using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cutlass::layout::RowMajor, 8, Element,
        cutlass::layout::ColumnMajor, 8, float, typename Product::Tile, Cluster,
        cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
        cutlass::gemm::KernelTmaWarpSpecializedPingpong>::CollectiveOp;
    using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue,
                                                        cutlass::gemm::PersistentScheduler>;

    static typename Kernel::Arguments arguments(const QkvRotaryArgs& args, const QkvRotaryPlan& plan) {
        typename Kernel::Arguments arguments{};
        arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
        Product::fill(arguments, args);
        arguments.epilogue.ptr_D = static_cast<Element*>(args.out);
        arguments.scheduler.max_swizzle_size = plan.swizzle;
        using Order = decltype(arguments.scheduler.raster_order);
        const bool along_tokens = plan.raster == QkvRotaryPlan::Raster::rows;
        arguments.scheduler.raster_order = along_tokens != kernel.transposed ? Order::AlongM : Order::AlongN;
        arguments.hw_info.sm_count = current_device().sms;
        return arguments;
    }

    static size_t workspace(const QkvRotaryArgs& args, const QkvRotaryPlan& plan) {
        return Kernel::get_workspace_size(arguments(args, plan));
    }

    static void launch(const QkvRotaryArgs& args, const QkvRotaryPlan& plan, void* workspace, cudaStream_t stream) {
        const auto kernel_arguments = arguments(args, plan);
        if (!Kernel::can_implement(kernel_arguments)) fail(cutlass::Status::kErrorInvalidProblem);
        check(Kernel::initialize_workspace(kernel_arguments, workspace, stream));
        typename Kernel::Params params = Kernel::to_underlying_arguments(kernel_arguments, workspace);
        const auto entry = reinterpret_cast<const void*>(cutlass::device_kernel<Kernel>);
        constexpr int shared_bytes = Kernel::SharedStorageSize;
        check_cuda(cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
                   "cudaFuncSetAttribute");
        void* parameters[] = {&params};
        check(cutlass::ClusterLauncher::launch(Kernel::get_grid_shape(params),
                                               dim3(cute::size<0>(Cluster{}), cute::size<1>(Cluster{})),
                                               Kernel::get_block_shape(), shared_bytes, stream, entry, parameters,
                                               /*launch_with_pdl=*/true));  // compiled for sm_90a only
    }

private:
    static void check(cutlass::Status status) {
        if (status != cutlass::Status::kSuccess) fail(status);
    }

    [[noreturn]] static void fail(cutlass::Status status) {
        cudaGetLastError();  // clears it, as check_cuda does
        throw std::runtime_error("mrrope: the projection by " + describe(kernel) +
                                 " could not be launched: " + cutlass::cutlassGetStatusString(status));
    }
};

template <QkvKernel kernel>
QkvLauncher qkv_launcher(DType dtype) {
    using Half = QkvProjection<kernel, cutlass::half_t>;
    using Bfloat = QkvProjection<kernel, cutlass::bfloat16_t>;
    return dtype == DType::float16 ? QkvLauncher{Half::workspace, Half::launch}
                                   : QkvLauncher{Bfloat::workspace, Bfloat::launch};
}

}  // namespace mrrope
