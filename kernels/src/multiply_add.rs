//! Loops around a fused multiply-add, which rounds once, as the CUDA kernels do.
//!
//! `f32::mul_add` is always exact, but if the target's baseline has no such instruction it is a library call for each
//! element. On x86-64 these loops are therefore compiled twice, and the processor's features select one. Both give the
//! same bits.

macro_rules! fused_loop {
    ($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),*) $body:block) => {
        $(#[$doc])*
        pub(crate) fn $name($($arg: $ty),*) {
            #[inline(always)]
            fn portable($($arg: $ty),*) $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn vectorised($($arg: $ty),*) {
                    portable($($arg),*);
                }
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    // SAFETY: this processor has the features.
                    return unsafe { vectorised($($arg),*) };
                }
            }
            portable($($arg),*)
        }
    };
}

fused_loop! {
    /// `weights -= rate * gradient`.
    fn descend(weights: &mut [f32], gradient: &[f32], rate: f32) {
        for (weight, &slope) in weights.iter_mut().zip(gradient) {
            *weight = (-rate).mul_add(slope, *weight);
        }
    }
}

fused_loop! {
    /// `out = source * scale + shift`, from bytes.
    fn scale_bytes(out: &mut [f32], source: &[u8], scale: f32, shift: f32) {
        for (out, &value) in out.iter_mut().zip(source) {
            *out = f32::from(value).mul_add(scale, shift);
        }
    }
}

fused_loop! {
    /// `out = source * scale + shift`.
    fn scale_floats(out: &mut [f32], source: &[f32], scale: f32, shift: f32) {
        for (out, &value) in out.iter_mut().zip(source) {
            *out = value.mul_add(scale, shift);
        }
    }
}
