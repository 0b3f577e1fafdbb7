#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <sstream>

#include "build_info.h"
#include "mrrope/frequency_table.h"
#include "mrrope/instruction_set.h"

// Python module mrrope._core: frequency tables, and what the package was built with. It does not link torch; the ops
// are in libmrrope_torch2.11 and its likes.

namespace py = pybind11;

namespace mrrope {
namespace {

// The same bits as int64, since torch has little uint64 arithmetic.
std::vector<int64_t> as_signed(const std::vector<uint64_t>& words) {
    return {words.begin(), words.end()};
}

// The argument of build_table that a method needs, or none.
std::optional<std::string> argument_of(Needs needs) {
    switch (needs) {
        case Needs::nothing: break;
        case Needs::power: return "power";
        case Needs::radix_factors:
        case Needs::cumulative_scales: return "factors";
        case Needs::beta: return "beta";
    }
    return std::nullopt;
}

FrequencyTable assemble(const std::string& method, int rotary_dim, double base, double original_max_position,
                        double scale, std::optional<Bounds> bounds, double attention_factor,
                        std::vector<double> inv_freq, std::vector<double> cumulative_scale,
                        const std::vector<int64_t>& turns) {
    FrequencyTable table{.method = method_from_name(method),
                         .rotary_dim = rotary_dim,
                         .base = base,
                         .original_max_position = original_max_position,
                         .scale = scale,
                         .bounds = bounds,
                         .attention_factor = attention_factor,
                         .inv_freq = std::move(inv_freq),
                         .cumulative_scale = std::move(cumulative_scale),
                         .turns = {turns.begin(), turns.end()}};
    validate(table);
    return table;
}

std::optional<std::string> value_or_none(const std::string& value) {
    return value.empty() ? std::nullopt : std::optional(value);
}

std::vector<std::string> items(const std::string& list) {
    std::vector<std::string> found;
    std::istringstream stream(list);
    for (std::string item; std::getline(stream, item, ';');) found.push_back(item);
    return found;
}

py::dict build_info() {
    return py::dict(py::arg("torch") = items(built::torch), py::arg("compiler") = built::compiler,
                    py::arg("instruction_sets") = items(built::instruction_sets),
                    py::arg("nvcc") = value_or_none(built::nvcc),
                    py::arg("without_cuda") = value_or_none(built::without_cuda),
                    py::arg("machine_code") = items(built::machine_code), py::arg("ptx") = items(built::ptx),
                    py::arg("cutlass") = value_or_none(built::cutlass), py::arg("wgmma") = built::wgmma);
}

}  // namespace
}  // namespace mrrope

PYBIND11_MODULE(_core, m) {
    using namespace mrrope;
    m.doc() = "Frequency tables of rotary position embeddings.";

    m.def("build_info", &build_info);
    m.def("cpu_instruction_set", &cpu_instruction_set);

    py::class_<FrequencyTable>(m, "Table")
        .def(py::init(&assemble), py::kw_only(), py::arg("method"), py::arg("rotary_dim"), py::arg("base"),
             py::arg("original_max_position"), py::arg("scale"), py::arg("bounds"), py::arg("attention_factor"),
             py::arg("inv_freq"), py::arg("cumulative_scale"), py::arg("turns"))
        .def_property_readonly("method", [](const FrequencyTable& t) { return method_name(t.method); })
        .def_readonly("rotary_dim", &FrequencyTable::rotary_dim)
        .def_readonly("base", &FrequencyTable::base)
        .def_readonly("original_max_position", &FrequencyTable::original_max_position)
        .def_readonly("scale", &FrequencyTable::scale)
        .def_readonly("bounds", &FrequencyTable::bounds)
        .def_readonly("attention_factor", &FrequencyTable::attention_factor)
        .def_readonly("inv_freq", &FrequencyTable::inv_freq)
        .def_readonly("cumulative_scale", &FrequencyTable::cumulative_scale)
        .def_property_readonly("radix_factors", &FrequencyTable::radix_factors)
        .def_property_readonly("turns", [](const FrequencyTable& t) { return as_signed(t.turns); })
        .def("packed", [](const FrequencyTable& t) { return as_signed(packed(t)); });

    m.def(
        "build_table",
        [](const std::string& method, int rotary_dim, double base, double original_max_position, double scale,
           double alpha, double beta, std::optional<Bounds> bounds, std::optional<double> power,
           std::vector<double> factors, std::optional<double> attention_factor, std::vector<double> native_scale,
           double native_attention_factor) {
            return build_table({.method = method_from_name(method),
                                .rotary_dim = rotary_dim,
                                .base = base,
                                .original_max_position = original_max_position,
                                .scale = scale,
                                .alpha = alpha,
                                .beta = beta,
                                .bounds = bounds,
                                .power = power,
                                .factors = std::move(factors),
                                .attention_factor = attention_factor,
                                .native_scale = std::move(native_scale),
                                .native_attention_factor = native_attention_factor});
        },
        py::kw_only(), py::arg("method"), py::arg("rotary_dim"), py::arg("base"), py::arg("original_max_position"),
        py::arg("scale"), py::arg("alpha"), py::arg("beta"), py::arg("bounds"), py::arg("power"), py::arg("factors"),
        py::arg("attention_factor"), py::arg("native_scale"), py::arg("native_attention_factor"));
    m.def("relative", &relative, py::kw_only(), py::arg("to"), py::arg("from_"));
    m.def("inverse", &inverse);
    py::class_<MethodTraits>(m, "MethodTraits")
        .def_readonly("name", &MethodTraits::name)
        .def_readonly("has_temperature", &MethodTraits::has_temperature)
        .def_property_readonly("needs", [](const MethodTraits& t) { return argument_of(t.needs); })
        .def_readonly("power", &MethodTraits::power);
    m.def("methods", &methods);
}
