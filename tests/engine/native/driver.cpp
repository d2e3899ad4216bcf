// Calls one kernel, for instructions that the tests' own process does not have: reads its arguments and the memory that they point to from
// standard input, and writes that memory as it is afterwards to standard output. tests/engine/native/test_instructions.py has the other side.

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include KERNELS

namespace {

enum Kind { INTEGER, FLOAT, POINTER };

int64_t read_integer() {
    int64_t value;
    if (std::fread(&value, sizeof(value), 1, stdin) != 1) std::exit(2);
    return value;
}

// All integers and pointers of a call, then all floats: where both lie in registers or on the stack does not depend on the others' order, on
// x86-64 as on arm64, and what a function does not expect it does not read.
#define EIGHT int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t
using Kernel = void (*)(EIGHT, EIGHT, EIGHT, float, float);

const std::map<std::string, void*> KERNEL_OF = {
    {"penstock_panel_linear", reinterpret_cast<void*>(penstock_panel_linear)},
    {"penstock_float8_linear", reinterpret_cast<void*>(penstock_float8_linear)},
    {"penstock_quantized_linear", reinterpret_cast<void*>(penstock_quantized_linear)},
    {"penstock_quantized_rows", reinterpret_cast<void*>(penstock_quantized_rows)},
    {"penstock_quantize_rows", reinterpret_cast<void*>(penstock_quantize_rows)},
    {"penstock_paged_decode", reinterpret_cast<void*>(penstock_paged_decode)},
    {"penstock_paged_prefill", reinterpret_cast<void*>(penstock_paged_prefill)},
    {"penstock_run_decoder", reinterpret_cast<void*>(penstock_run_decoder)},
    {"penstock_most_probable", reinterpret_cast<void*>(penstock_most_probable)},
    {"penstock_choose", reinterpret_cast<void*>(penstock_choose)},
    {"penstock_most_probable_tokens", reinterpret_cast<void*>(penstock_most_probable_tokens)},
};

}  // namespace

int main(int argc, char** argv) {
    if (argc == 1) return std::puts(penstock_instructions()) < 0;
    std::vector<int64_t> sizes(read_integer());
    for (int64_t& size : sizes) size = read_integer();
    std::vector<char*> memory;
    for (int64_t size : sizes) {
        memory.push_back(static_cast<char*>(std::aligned_alloc(64, (size + 64) / 64 * 64)));
        if (std::fread(memory.back(), 1, size, stdin) != static_cast<size_t>(size)) return 2;
    }
    for (int64_t i = read_integer(); i > 0; --i) {  // pointers within the memory
        const int64_t buffer = read_integer(), offset = read_integer(), target = read_integer();
        std::memcpy(memory[buffer] + offset, &memory[target], sizeof(char*));
    }
    int64_t integers[24] = {};
    float floats[2] = {};
    int64_t num_integers = 0, num_floats = 0;
    for (int64_t i = read_integer(); i > 0; --i) {
        const int64_t kind = read_integer(), value = read_integer();
        if (kind == FLOAT) {
            std::memcpy(&floats[num_floats++], &value, sizeof(float));
        } else {
            integers[num_integers++] = kind == POINTER ? reinterpret_cast<int64_t>(memory[value]) : value;
        }
    }
    const int64_t* a = integers;
    reinterpret_cast<Kernel>(KERNEL_OF.at(argv[1]))(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14],
                                                    a[15], a[16], a[17], a[18], a[19], a[20], a[21], a[22], a[23], floats[0], floats[1]);
    for (size_t i = 0; i < sizes.size(); ++i) std::fwrite(memory[i], 1, sizes[i], stdout);
    std::fflush(stdout);
    std::_Exit(0);  // the kernels' threads run as long as the process
}
