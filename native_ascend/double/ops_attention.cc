// Rotation, cache writer, lightning indexer, sparse attention (ascend.md rows 8, 14, 18, 19).
#include <algorithm>
#include <numeric>

#include "formats.h"
#include "tensors.h"

namespace twin {
namespace {

constexpr int64_t kWorkspace = 8192;
constexpr int64_t kMetadata = 1024;
constexpr size_t kBlock = 64;
constexpr int64_t kAttention = 0x5f41, kIndexer = 0x5f49;

// A metadata operator leaves a pattern that its main operator looks for.
void write_metadata(const aclTensor& t, int64_t kind) {
  std::vector<int64_t> pattern(kMetadata);
  for (int64_t i = 0; i < kMetadata; i++) pattern[i] = (kind * 31 + i * 7) % 100003;
  write_integers(t, pattern);
}

void require_metadata(const Call& c, int place, int64_t kind) {
  std::vector<int64_t> found = read_integers(c.tensor(place));
  bool good = true;
  for (int64_t i = 0; i < kMetadata; i++) good = good && found[i] == (kind * 31 + i * 7) % 100003;
  c.require(good, "metadata was not written by the metadata operator before");
}

void check_metadata(const Call& c, int place) {
  c.require_shape(place, {kMetadata});
  c.require_dtype(place, {acl::kInt32});
}

// Gates of 9.1, which a test of a narrower model switches off by name.
void gate(const Call& c, const char* name, bool good, const char* rule) {
  if (setting(name, 1)) c.require(good, rule);
}

const Register kRotary("aclnnInplacePartialRotaryMul", {
    [](const Call& c) {
      const aclTensor& x = c.tensor(0);
      c.require_dtype(0, {acl::kFloat, acl::kBf16});
      c.require(x.dims.size() == 4, "x has four axes");
      c.require(c.tensor(1).dtype == x.dtype && c.tensor(2).dtype == x.dtype, "cos and sin as x");
      c.require(c.integer(3) == 1, "interleaved pairs");
      const auto& slice = c.numbers(4);
      c.require(slice.size() == 2 && slice[0] >= 0 && slice[1] <= x.dims[3] && slice[0] < slice[1] &&
                    (slice[1] - slice[0]) % 2 == 0, "partialSlice");
      c.require_shape(1, {x.dims[0], 1, 1, slice[1] - slice[0]});
      c.require_shape(2, {x.dims[0], 1, 1, slice[1] - slice[0]});
    },
    [](const Call& c) {
      const aclTensor& t = c.tensor(0);
      int64_t first = c.numbers(4)[0], width = c.numbers(4)[1] - first, dim = t.dims[3];
      int64_t inner = t.dims[1] * t.dims[2];
      Values x = read(t), cos = read(c.tensor(1)), sin = read(c.tensor(2));
      for (int64_t r = 0; r < t.dims[0] * inner; r++) {
        const float *co = cos.data() + r / inner * width, *si = sin.data() + r / inner * width;
        float* row = x.data() + r * dim + first;
        for (int64_t i = 0; i < width; i += 2) {
          float a = row[i], b = row[i + 1];
          row[i] = a * co[i] - b * si[i];
          row[i + 1] = a * si[i + 1] + b * co[i + 1];
        }
      }
      write(t, x);
    }, kWorkspace});

const Register kCache("aclnnIndexerQuantCache", {
    [](const Call& c) {
      const aclTensor &cache = c.tensor(0), &scale = c.tensor(1), &x = c.tensor(2);
      c.require_dtype(0, {acl::kE2m1});
      c.require_dtype(1, {acl::kE8m0});
      c.require_dtype(2, {acl::kBf16});
      c.require(c.integer(4) == 3 && c.integer(5) == 1, "quantMode 3 with rounded scales (row 18)");
      c.require(cache.dims.size() == 4 && x.dims.size() == 2 && cache.dims[3] == x.dims[1], "shapes");
      std::vector<int64_t> scales = mx_scales(cache.dims);
      c.require(scale.dims == scales, "scales [blocks, rows, 1, ceil(d / 64), 2]");
      c.require_shape(3, {x.dims[0]});
      c.require_dtype(3, {acl::kInt32, acl::kInt64});
    },
    [](const Call& c) {
      const aclTensor &cache = c.tensor(0), &scale = c.tensor(1), &x = c.tensor(2);
      int64_t d = x.dims[1], stored = (d + 63) / 64 * 2;
      std::vector<int64_t> slots = read_integers(c.tensor(3));
      Quantised q = quantise(read(x), d, acl::kE2m1);
      char *data = bytes(cache), *scales = bytes(scale);
      for (size_t r = 0; r < slots.size(); r++) {
        if (slots[r] == -1) continue;
        c.require(slots[r] >= 0 && slots[r] < cache.dims[0] * cache.dims[1], "a slot lies outside the cache");
        for (int64_t i = 0; i < d; i += 2) {
          uint8_t low = encode_e2m1(q.codes[r * d + i]), high = encode_e2m1(q.codes[r * d + i + 1]);
          data[(slots[r] * d + i) / 2] = static_cast<char>(low | high << 4);
        }
        aclTensor row;
        row.dims = {stored};
        row.strides = {1};
        row.dtype = acl::kE8m0;
        row.address = scales + slots[r] * stored;
        write(row, Values(q.scales.begin() + r * stored, q.scales.begin() + (r + 1) * stored));
      }
    }, kWorkspace});

// Pages of one sequence in order: row i of the sequence is row `at(i)` of the cache.
struct Pages {
  std::vector<int64_t> table;
  int64_t rows, blocks;
  int64_t at(const Call& c, int64_t i) const {
    c.require(i / rows < static_cast<int64_t>(table.size()), "a block table is too short");
    int64_t block = table[i / rows];
    c.require(block >= 0 && block < blocks, "a block table names a block that does not exist");
    return block * rows + i % rows;
  }
};

Pages pages_of(const aclTensor& cache, const aclTensor& table, int64_t sequence) {
  std::vector<int64_t> all = read_integers(table);
  int64_t width = table.dims[1];
  return {{all.begin() + sequence * width, all.begin() + (sequence + 1) * width}, cache.dims[1], cache.dims[0]};
}

const Register kIndexMetadata("aclnnQuantLightningIndexerV2Metadata", {
    [](const Call& c) { check_metadata(c, 17); },
    [](const Call& c) { write_metadata(c.tensor(17), kIndexer); }, 64});

const Register kIndex("aclnnQuantLightningIndexerV2", {
    [](const Call& c) {
      const aclTensor &q = c.tensor(0), &key = c.tensor(1);
      c.require_dtype(0, {acl::kE2m1});
      c.require_dtype(1, {acl::kE2m1});
      c.require(q.dims.size() == 3 && key.dims.size() == 4 && key.dims[2] == 1, "q [t, n, d], keys paged");
      int64_t d = q.dims[2];
      c.require(q.dims[1] <= 64, "at most 64 heads (9.1)");
      gate(c, "lightning_indexer.head_dim", d == 128, "head dimension 128 (9.1)");
      c.require(key.dims[3] == d, "head dimensions agree");
      c.require_shape(2, {q.dims[0], q.dims[1]});
      c.require_dtype(2, {acl::kFloat});
      c.require_shape(3, mx_scales(q.dims));
      c.require_shape(4, mx_scales(key.dims));
      c.require_null({6, 7, 11});
      c.require(c.integer(14) == 5, "quantMode 5 is MXFP4");
      c.require(c.text(16) == "TND" && c.text(17) == "PA_BBND", "layouts TND and PA_BBND");
      c.require(c.integer(18) == 3, "maskMode 3");
      int64_t ratio = c.integer(19);
      c.require(ratio >= 1 && ratio <= 128, "ratio 1..128");
      if (ratio != 1) c.require(c.has(9), "cmpResidualK is required when the ratio is not 1");
      c.require(c.integer(13) >= 1 && c.integer(13) <= 8192, "topk up to 8192");
      check_metadata(c, 12);
      c.require_shape(21, {q.dims[0], 1, c.integer(13)});
      c.require_dtype(21, {acl::kInt32});
    },
    [](const Call& c) {
      require_metadata(c, 12, kIndexer);
      const aclTensor &q = c.tensor(0), &key = c.tensor(1);
      int64_t heads = q.dims[1], d = q.dims[2], topk = c.integer(13), ratio = c.integer(19);
      Values query = scaled(read(q), read(c.tensor(3)), d), keys = scaled(read(key), read(c.tensor(4)), d);
      Values weights = read(c.tensor(2));
      std::vector<int64_t> first = read_integers(c.tensor(5)), used = read_integers(c.tensor(8));
      std::vector<int64_t> out(q.dims[0] * topk, -1);
      bool reverse = setting("reverse_ties", 0) != 0;  // a mutation for self_test
      for (size_t b = 0; b < used.size(); b++) {
        Pages pages = pages_of(key, c.tensor(10), static_cast<int64_t>(b));
        int64_t residual = ratio == 1 ? 0 : read_integers(c.tensor(9))[b];
        int64_t length = used[b] * ratio + residual;
        for (int64_t t = first[b]; t < first[b + 1]; t++) {
          int64_t position = length - (first[b + 1] - t), visible = (position + 1) / ratio;
          Values scores(visible);
          for (int64_t s = 0; s < visible; s++) {
            const float* row = keys.data() + pages.at(c, s) * d;
            float sum = 0;
            for (int64_t h = 0; h < heads; h++) {
              float dot = 0;
              for (int64_t i = 0; i < d; i++) dot += query[(t * heads + h) * d + i] * row[i];
              sum += bf16(std::fmax(bf16(dot), 0.0f) * weights[t * heads + h]);  // unverified: model.md 9.3
            }
            scores[s] = bf16(sum);
          }
          std::vector<int64_t> order(visible);
          std::iota(order.begin(), order.end(), 0);
          if (reverse) std::reverse(order.begin(), order.end());
          std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t e) { return scores[a] > scores[e]; });
          for (int64_t i = 0; i < std::min(topk, visible); i++) out[t * topk + i] = order[i];
        }
      }
      write_integers(c.tensor(21), out);
    }, kWorkspace});

const Register kAttentionMetadata("aclnnSparseFlashMlaMetadata", {
    [](const Call& c) {
      gate(c, "sparse_flash_mla.head_dim", c.integer(11) == 512, "head dimension 512 (9.1)");
      check_metadata(c, 27);
    },
    [](const Call& c) { write_metadata(c.tensor(27), kAttention); }, 64});

const Register kSparse("aclnnSparseFlashMla", {
    [](const Call& c) {
      const aclTensor &q = c.tensor(0), &kv = c.tensor(1);
      for (int place : {0, 1, 28}) c.require_dtype(place, {acl::kBf16});
      c.require(q.dims.size() == 3 && kv.dims.size() == 4 && kv.dims[2] == 1, "q [t, n, d], rows paged");
      gate(c, "sparse_flash_mla.head_dim", q.dims[2] == 512, "head dimension 512 (9.1)");
      c.require(kv.dims[3] == q.dims[2], "head dimensions agree");
      c.require_null({3, 8, 9, 10, 12, 14, 15});
      c.require(c.has(5) && c.has(7) && c.has(11), "block table, cuSeqlensQ and sequsedOriKv");
      if (c.has(2)) {
        c.require_dtype(2, {acl::kBf16});
        c.require(c.has(6) && c.has(4), "compressed rows need a block table and indices");
        c.require(c.tensor(4).dims.size() == 3 && c.tensor(4).dims[0] == q.dims[0], "indices [t, 1, k]");
        if (c.integer(19) != 1) c.require(c.has(13), "cmpResidualKv is required when the ratio is not 1");
      }
      c.require_shape(16, {q.dims[1]});
      c.require_dtype(16, {acl::kFloat});
      c.require(c.integer(20) == 4 && c.integer(21) == 3, "mask modes 4 and 3");
      c.require(c.integer(22) >= 0 && c.integer(23) == 0, "a window to the left");
      c.require(c.text(24) == "TND" && c.text(25) == "PA_BBND", "layouts TND and PA_BBND");
      c.require(c.integer(26) == 1 && c.integer(27) == 0, "topkValueMode 1, no LSE");
      check_metadata(c, 17);
      c.require_shape(28, q.dims);
    },
    [](const Call& c) {
      require_metadata(c, 17, kAttention);
      const aclTensor &q = c.tensor(0), &kv = c.tensor(1);
      int64_t heads = q.dims[1], d = q.dims[2], ratio = c.integer(19);
      int64_t window = c.integer(22) + 1;
      int64_t shift = setting("shift_window", 0), twice = setting("sink_twice", 0);  // mutations
      Values query = read(q), rows = read(kv), sinks = read(c.tensor(16)), selected, out(query.size());
      std::vector<int64_t> first = read_integers(c.tensor(7)), used = read_integers(c.tensor(11)), indices;
      if (c.has(2)) selected = read(c.tensor(2)), indices = read_integers(c.tensor(4));
      int64_t topk = c.has(2) ? c.tensor(4).dims[2] : 0;
      for (size_t b = 0; b < used.size(); b++) {
        Pages pages = pages_of(kv, c.tensor(5), static_cast<int64_t>(b)), others{};
        if (c.has(2)) others = pages_of(c.tensor(2), c.tensor(6), static_cast<int64_t>(b));
        for (int64_t t = first[b]; t < first[b + 1]; t++) {
          int64_t position = used[b] - (first[b + 1] - t);
          // A place for every row of the window, then the selected rows ascending: blocks of kBlock
          // share a maximum, to which probabilities are rounded (model.md 3.6; a device's is unverified).
          std::vector<const float*> keys(window, nullptr);
          int64_t lowest = std::max<int64_t>(0, position - window + 1 - shift), place = 0;
          for (int64_t p = lowest; p <= position - shift; p++) keys[place++] = rows.data() + pages.at(c, p) * d;
          std::vector<int64_t> chosen(indices.begin() + t * topk, indices.begin() + (t + 1) * topk);
          std::sort(chosen.begin(), chosen.end());
          for (int64_t index : chosen) {
            if (index < 0) continue;
            c.require(index < (position + 1) / ratio, "an index lies behind the causal mask");
            keys.push_back(selected.data() + others.at(c, index) * d);
          }
          for (int64_t h = 0; h < heads; h++) {
            const float* row = query.data() + (t * heads + h) * d;
            Values total(d);
            float most = -1e30f, sum = 0;
            for (size_t first_key = 0; first_key < keys.size(); first_key += kBlock) {
              size_t end = std::min(keys.size(), first_key + kBlock);
              Values scores(end - first_key, -INFINITY), values(d);
              float raised = most;
              for (size_t k = first_key; k < end; k++) {
                if (!keys[k]) continue;
                float dot = 0;
                for (int64_t i = 0; i < d; i++) dot += row[i] * keys[k][i];
                scores[k - first_key] = dot * static_cast<float>(c.real(18));
                raised = std::fmax(raised, scores[k - first_key]);
              }
              float shrink = std::exp(most - raised), part = 0;
              for (size_t k = first_key; k < end; k++) {
                if (!keys[k]) continue;
                float weight = std::exp(scores[k - first_key] - raised);
                part += weight;
                for (int64_t i = 0; i < d; i++) values[i] += bf16(weight) * keys[k][i];
              }
              for (int64_t i = 0; i < d; i++) total[i] = total[i] * shrink + values[i];
              sum = sum * shrink + part;
              most = raised;
            }
            float highest = std::fmax(most, sinks[h]), shrink = std::exp(most - highest);
            sum = sum * shrink + (twice ? 2 : 1) * std::exp(sinks[h] - highest);
            for (int64_t i = 0; i < d; i++) out[(t * heads + h) * d + i] = total[i] * shrink / sum;
          }
        }
      }
      write(c.tensor(28), out);
    }, kWorkspace});

}  // namespace
}  // namespace twin
