// Products of rows with quantized weights, for each type of weight and number of rows.

#include "quantized_portable.h"
#include "quantized_product.h"
#include "quantized_types.h"
#include "quantized_vnni.h"

void penstock_multiply_block(const void* product, int64_t type, int64_t first_row, int64_t num_rows, int64_t first_tile, int64_t num_tiles) {
    with_type(type, [&](auto kind) {
        static_cast<const QuantizedProduct*>(product)->multiply_block<decltype(kind)>(first_row, num_rows, first_tile, num_tiles);
    });
}
