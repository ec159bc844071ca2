/* w + c * g in one pass over memory, rounded twice like a product and a sum of their own. */

#if defined(__AVX512F__)
#define ROUNDED(v) __asm__("" : "+v"(v))
#elif defined(__SSE2__)
#define ROUNDED(v) __asm__("" : "+x"(v))
#elif defined(__aarch64__)
#define ROUNDED(v) __asm__("" : "+w"(v))
#endif

#ifdef ROUNDED
/* A vector that fits one register, whose product the compiler cannot fuse with the sum. */
int add_scaled(REAL *numbers, const REAL *gradient, double factor, long count) {
  const REAL by = (REAL)factor;
  long i = 0;
  for (; i + LANES <= count; i += LANES) {
    vector product = AT(gradient + i) * by;
    ROUNDED(product);
    *(vector *)(numbers + i) += product;
  }
  for (; i < count; i++) {
    REAL product = gradient[i] * by;
    ROUNDED(product);
    numbers[i] += product;
  }
  return 0;
}
#endif
