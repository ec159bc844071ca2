/* Convolutions with stride 1 for REAL numbers, LANES of them in a vector.

   An image lies in rows of `wide` numbers, zeros around it. Output pixel i of such a row-by-row numbering needs the
   pixels i + y * wide + x of every channel, so a vector of neighbouring pixels needs vectors of neighbours, whatever
   the width: rows that are shorter than a vector cost nothing but their few columns of border. */

INLINE void copy(const REAL *from, REAL *to, long count) {
  if (count < SMALL) {
    for (long i = 0; i < count; i++) to[i] = from[i];
    return;
  }
  for (long i = 0; i + SMALL <= count; i += SMALL) *(small *)(to + i) = *(const small *)(from + i);
  const long last = count - SMALL; /* overlaps what is there already */
  *(small *)(to + last) = *(const small *)(from + last);
}

/* Rows of `width` numbers, `from_step` apart, to rows that are `to_step` apart. */
INLINE void copy_rows(const REAL *from, long from_step, REAL *to, long to_step, long rows, long width) {
  if (from_step == width && to_step == width) {
    memcpy(to, from, (size_t)(rows * width) * sizeof(REAL));
    return;
  }
  for (long y = 0; y < rows; y++) copy(from + y * from_step, to + y * to_step, width);
}

/* The images of some channels into the middle of others that have zeros around them. */
INLINE void place(const REAL *from, REAL *to, long channels, long height, long width, long up, long left) {
  const long tall = height + 2 * up, wide = width + 2 * left;
  if (up == 0) {
    copy_rows(from, width, to + left, wide, channels * height, width);
    return;
  }
  for (long c = 0; c < channels; c++)
    copy_rows(from + c * height * width, width, to + (c * tall + up) * wide + left, wide, height, width);
}

/* `many` output channels, two vectors of pixels at a time. */
INLINE void pixels(const int many, const REAL *image, const REAL *weights, const REAL *bias, REAL *out, long channels,
                   long kh, long kw, long plane, long wide, long span, long room) {
  const long taps = channels * kh * kw;
  for (long i = 0; i < span; i += 2 * LANES) {
    vector sum[8][2];
    for (int m = 0; m < many; m++) sum[m][0] = sum[m][1] = (vector){0} + (bias ? bias[m] : 0);
    const REAL *tap = weights;
    for (long c = 0; c < channels; c++)
      for (long y = 0; y < kh; y++) {
        const REAL *from = image + c * plane + y * wide + i;
        for (long x = 0; x < kw; x++, tap++) {
          const vector here = AT(from + x), next = AT(from + x + LANES);
          for (int m = 0; m < many; m++) {
            sum[m][0] += here * tap[m * taps];
            sum[m][1] += next * tap[m * taps];
          }
        }
      }
    for (int m = 0; m < many; m++) {
      *(vector *)(out + m * room + i) = sum[m][0];
      *(vector *)(out + m * room + i + LANES) = sum[m][1];
    }
  }
}

/* out = maps * weights + bias; weights are [co][ci][kh][kw], and without a bias it is a null pointer. */
int convolve(const REAL *maps, const REAL *weights, const REAL *bias, REAL *out, long batch, long ci, long height,
             long width, long co, long kh, long kw, long up, long left) {
  const long tall = height + 2 * up, wide = width + 2 * left, ho = tall - kh + 1, wo = wide - kw + 1;
  const long span = (ho - 1) * wide + wo, room = span + 2 * LANES, taps = ci * kh * kw;
  const long image = ci * tall * wide + 4 * LANES; /* vectors read beyond the last pixel */
  REAL *padded = calloc((size_t)(image + co * room), sizeof(REAL)), *flat = padded + image;
  if (!padded) return 1;
  for (long n = 0; n < batch; n++, maps += ci * height * width, out += co * ho * wo) {
    place(maps, padded, ci, height, width, up, left);
    for (long m = 0; m < co;) {
      const long more = co - m;
#define PIXELS(many)                                                                                              \
  pixels(many, padded, weights + m * taps, bias ? bias + m : 0, flat + m * room, ci, kh, kw, tall * wide, wide, span, \
         room),                                                                                                   \
      m += many
      if (MOST_PIXELS >= 8 && more >= 8) PIXELS(8);
      else if (more >= 6) PIXELS(6);
      else if (more >= 4) PIXELS(4);
      else if (more >= 2) PIXELS(2);
      else PIXELS(1);
#undef PIXELS
    }
    for (long m = 0; m < co; m++) copy_rows(flat + m * room, wide, out + m * ho * wo, wo, ho, wo);
  }
  free(padded);
  return 0;
}

/* The gradient of the maps: the output's gradient convolved with the weights turned round. */
int maps_gradient(const REAL *gradient, const REAL *weights, REAL *out, long batch, long ci, long height, long width,
                  long co, long kh, long kw, long up, long left) {
  const long window = kh * kw;
  REAL *turned = malloc((size_t)(ci * co * window) * sizeof(REAL));
  if (!turned) return 1;
  for (long m = 0; m < co; m++)
    for (long c = 0; c < ci; c++)
      for (long k = 0; k < window; k++)
        turned[(c * co + m) * window + window - 1 - k] = weights[(m * ci + c) * window + k];
  const int failed = convolve(gradient, turned, 0, out, batch, co, height + 2 * up - kh + 1, width + 2 * left - kw + 1,
                              ci, kh, kw, kh - 1 - up, kw - 1 - left);
  free(turned);
  return failed;
}

/* The sums of `many` output channels times `some` neighbouring taps, over the pixels of some images. */
INLINE void products(const int many, const int some, const REAL *image, const REAL *gradient, vector *sums, long taps,
                     long room, long span, long images, long next_image, long next_gradient) {
  vector sum[4][5];
  for (int m = 0; m < many; m++)
    for (int k = 0; k < some; k++) sum[m][k] = sums[m * taps + k];
  for (long n = 0; n < images; n++, image += next_image, gradient += next_gradient)
    for (long i = 0; i < span; i += LANES) {
      vector factor[4];
      for (int m = 0; m < many; m++) {
        factor[m] = AT(gradient + m * room + i);
        IN_REGISTER(factor[m]);
      }
      for (int k = 0; k < some; k++) {
        const vector here = AT(image + i + k);
        for (int m = 0; m < many; m++) sum[m][k] += factor[m] * here;
      }
    }
  for (int m = 0; m < many; m++)
    for (int k = 0; k < some; k++) sums[m * taps + k] = sum[m][k];
}

/* The gradients of weights and bias; every weight is a vector of partial sums until the last image. */
int weights_gradient(const REAL *maps, const REAL *gradient, REAL *of_weights, REAL *of_bias, long batch, long ci,
                     long height, long width, long co, long kh, long kw, long up, long left) {
  const long tall = height + 2 * up, wide = width + 2 * left, ho = tall - kh + 1, wo = wide - kw + 1;
  const long span = (ho - 1) * wide + wo, taps = ci * kh * kw;
  const long room = (ho * wide + 2 * LANES - 1) / LANES * LANES; /* zeros between rows and after the last */
  const long image = ci * tall * wide + 2 * LANES, gradients = co * room;
  long together = NEAR_BYTES / ((image + gradients) * (long)sizeof(REAL));
  together = together < 1 ? 1 : together > batch ? batch : together;
  const long sums_size = (co * taps + co) * LANES;
  REAL *memory = calloc((size_t)(sums_size + together * (image + gradients)), sizeof(REAL));
  if (!memory) return 1;
  vector *sums = (vector *)memory, *bias_sums = sums + co * taps;
  REAL *flat = memory + sums_size, *padded = flat + together * gradients;
  for (long n = 0; n < batch; n += together) {
    const long images = batch - n < together ? batch - n : together;
    for (long j = 0; j < images; j++, maps += ci * height * width)
      place(maps, padded + j * image, ci, height, width, up, left);
    for (long j = 0; j < images; j++)
      for (long m = 0; m < co; m++, gradient += ho * wo) {
        REAL *to = flat + j * gradients + m * room;
        copy_rows(gradient, wo, to, wide, ho, wo);
        vector sum = bias_sums[m];
        for (long i = 0; i < span; i += LANES) sum += AT(to + i);
        bias_sums[m] = sum;
      }
    for (long m = 0, many; m < co; m += many) {
      const long more = co - m;
      many = MOST_PRODUCTS >= 4 && more >= 4 ? 4 : more >= 2 ? 2 : 1;
      for (long c = 0; c < ci; c++)
        for (long y = 0; y < kh; y++)
          for (long x = 0, some; x < kw; x += some) {
            some = kw - x >= 5 ? 5 : kw - x >= 3 ? 3 : 1;
            const REAL *from = padded + (c * tall + y) * wide + x;
            vector *to = sums + m * taps + (c * kh + y) * kw + x;
#define PRODUCTS(a, b)                                                                                              \
  if (many == a && some == b)                                                                                       \
  products(a, b, from, flat + m * room, to, taps, room, span, images, image, gradients)
            PRODUCTS(4, 5); else PRODUCTS(4, 3); else PRODUCTS(4, 1);
            else PRODUCTS(2, 5); else PRODUCTS(2, 3); else PRODUCTS(2, 1);
            else PRODUCTS(1, 5); else PRODUCTS(1, 3); else PRODUCTS(1, 1);
#undef PRODUCTS
          }
    }
  }
  for (long m = 0; m < co * taps + co; m++) {
    REAL total = 0;
    for (int lane = 0; lane < LANES; lane++) total += sums[m][lane];
    if (m < co * taps) of_weights[m] = total;
    else of_bias[m - co * taps] = total;
  }
  free(memory);
  return 0;
}
